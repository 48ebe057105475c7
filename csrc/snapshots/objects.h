// What something was made from, asked in one call: modules, hooks and settings by their dicts, and tensors. The answers are
// bytes that are equal as long as nothing has changed. cvt_kernels/changes.py has the same function in Python, for where
// this extension was not built.
#pragma once

// pybind11 as torch brings it along. torch 2.11 refuses to share it with users of the stable ABI, which has nothing to do
// with it.
#pragma push_macro("TORCH_TARGET_VERSION")
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>
#pragma pop_macro("TORCH_TARGET_VERSION")

#include <bit>
#include <limits>

#include "common/tensors.h"

namespace cvt_kernels::snapshots {

namespace py = pybind11;

using Facts = std::vector<int64_t>;

template <class Number>
py::bytes bytes_of(const std::vector<Number>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number)};
}

inline PyObject* dict_of(py::handle object) {
  if (!PyDict_Check(object.ptr())) throw py::type_error("expected a list of dicts");
  return object.ptr();
}

// An item of a dict, borrowed; null where there is none.
inline PyObject* item_of(py::handle dict, py::handle name) {
  PyObject* item = PyDict_GetItemWithError(dict_of(dict), name.ptr());
  if (item == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return item;
}

// The number of values of each dict, and the identity of each value.
inline void add_identities(const py::list& dicts, Facts& found) {
  for (const py::handle dict : dicts) {
    found.push_back(PyDict_GET_SIZE(dict_of(dict)));
    PyObject* value;
    for (Py_ssize_t place = 0; PyDict_Next(dict.ptr(), &place, nullptr, &value);) {
      found.push_back(reinterpret_cast<int64_t>(value));
    }
  }
}

// The number of attributes of each module besides the package's own, and whether a forward is among them.
inline void add_attributes(const py::list& spaces, py::handle own, Facts& found) {
  static const py::str& forward = *new py::str("forward");  // never freed, since Python may end before
  for (const py::handle space : spaces) {
    found.push_back(PyDict_GET_SIZE(dict_of(space)) - (item_of(space, own) != nullptr));
    found.push_back(item_of(space, forward) != nullptr);
  }
}

// The numbers of the hooks in each dict but the ignored ones; PyTorch gives no number twice.
inline void add_hooks(const py::list& dicts, const py::set& ignored, Facts& found) {
  for (size_t i = 0; i < dicts.size(); i++) {
    PyObject* dict = dict_of(PyList_GET_ITEM(dicts.ptr(), static_cast<Py_ssize_t>(i)));
    PyObject* key;
    for (Py_ssize_t place = 0; PyDict_Next(dict, &place, &key, nullptr);) {
      const int is_ignored = PySet_Contains(ignored.ptr(), key);
      if (is_ignored < 0) throw py::error_already_set();
      if (is_ignored != 0) continue;
      found.push_back(static_cast<int64_t>(i));
      const int64_t number = PyLong_AsLongLong(key);
      if (number == -1 && PyErr_Occurred()) throw py::error_already_set();
      found.push_back(number);
    }
  }
}

// Whether the values that were found by objects and names, None where there was none, are, or equal, what `look_up` finds.
template <class LookUp>
bool are_same(const py::tuple& given, LookUp look_up) {
  const py::list objects = given[0], names = given[1], values = given[2];
  if (names.size() != objects.size() || values.size() != objects.size()) {
    throw py::value_error("expected lists of one length");
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects.ptr()); i++) {
    const py::object found = look_up(PyList_GET_ITEM(objects.ptr(), i), PyList_GET_ITEM(names.ptr(), i));
    const int is_same = PyObject_RichCompareBool(found.ptr(), PyList_GET_ITEM(values.ptr(), i), Py_EQ);
    if (is_same < 0) throw py::error_already_set();
    if (is_same == 0) return false;
  }
  return true;
}

inline py::object item_or_none(py::handle dict, py::handle name) {
  PyObject* item = item_of(dict, name);
  return py::reinterpret_borrow<py::object>(item == nullptr ? Py_None : item);
}

inline py::object attribute_or_none(py::handle object, py::handle name) {
  PyObject* found = PyObject_GetAttr(object.ptr(), name.ptr());
  if (found != nullptr) return py::reinterpret_steal<py::object>(found);
  if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
  PyErr_Clear();
  return py::none();
}

// An attribute of tensors that Python computes, of one tensor after the other: looked up once for tensors of a class, then
// read by the function behind it.
class Attribute {
 public:
  explicit Attribute(const char* name) : name_(name) {}

  int64_t of(PyObject* tensor) {
    if (Py_TYPE(tensor) != type_) look_up(Py_TYPE(tensor));
    PyObject* found = getter_ == nullptr ? PyObject_GetAttr(tensor, name_.ptr()) : getter_->get(tensor, getter_->closure);
    const py::object number = py::reinterpret_steal<py::object>(found);
    const int64_t value = number ? PyLong_AsLongLong(number.ptr()) : -1;
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

 private:
  void look_up(PyTypeObject* type) {
    const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name_.ptr()));
    if (!found) throw py::error_already_set();
    const bool is_read_as_found = Py_IS_TYPE(found.ptr(), &PyGetSetDescr_Type) &&
                                  type->tp_getattro == PyObject_GenericGetAttr &&
                                  PyType_IsSubtype(type, PyDescr_TYPE(found.ptr()));
    getter_ = is_read_as_found ? reinterpret_cast<PyGetSetDescrObject*>(found.ptr())->d_getset : nullptr;
    type_ = type;
  }

  py::str name_;
  PyTypeObject* type_ = nullptr;
  const PyGetSetDef* getter_ = nullptr;
};

// Versions of tensors; that of an inference tensor, which has none, is -1.
class Version {
 public:
  int64_t of(PyObject* tensor) {
    if (has_failed_ && is_inference(tensor)) return -1;
    try {
      return version_.of(tensor);
    } catch (py::error_already_set& error) {  // microseconds, for the first such tensor only
      if (!error.matches(PyExc_RuntimeError) || !is_inference(tensor)) throw;
      has_failed_ = true;
      return -1;
    }
  }

 private:
  static bool is_inference(PyObject* tensor) {
    return py::reinterpret_borrow<py::object>(tensor).attr("is_inference")().cast<bool>();
  }

  Attribute version_{"_version"};
  bool has_failed_ = false;
};

// Where a tensor lies. What torch's stable ABI takes for a tensor is the address of a pointer to what Python calls
// _cdata; holds_pointer() says whether that is still so in this torch.
struct Layout {
  explicit Layout(int64_t pointer) {
    const auto tensor = reinterpret_cast<AtenTensorHandle>(&pointer);
    TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(tensor, &address));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
  }

  void append_to(std::vector<int64_t>& found) const {
    found.insert(found.end(), {reinterpret_cast<int64_t>(address), dtype, dim});
    found.insert(found.end(), sizes, sizes + dim);
    found.insert(found.end(), strides, strides + dim);
  }

  const void* address;
  int32_t dtype, device;
  int64_t dim;
  int64_t *sizes, *strides;
};

// A part of a tensor's bytes, by which writes that PyTorch does not count are noticed.
//
// Of a tensor, eight lines of 64 bytes are read: the first, the last, and one at random in each sixth between them; all of
// a smaller one. So 128 numbers of float32 are compared for eight misses of the cache. Of a tensor with gaps between its
// numbers, or with numbers that share memory, 64 single ones are.
class Sample {
 public:
  static constexpr int64_t kLine = 64, kBetween = 6, kLines = kBetween + 2, kSingles = 64;

  // `place` differs from tensor to tensor. Begins to load the bytes.
  Sample(const Layout& layout, uint64_t place)
      : layout_(layout), address_(static_cast<const char*>(layout.address)), item_(aoti_torch_dtype_element_size(layout.dtype)) {
    int64_t extent = 1;  // from the first to the last number
    for (int64_t i = 0; i < layout.dim; i++) {
      numbers_ *= layout.sizes[i];
      extent += (layout.sizes[i] - 1) * layout.strides[i];
    }
    if (address_ == nullptr) numbers_ = 0;
    bytes_ = numbers_ * item_;
    is_dense_ = extent == numbers_;
    random_ = mixed(place + 1);
    if (numbers_ == 0 || !is_dense_) return;
    lines_ = std::min(kLines, bytes_ / kLine);
    for (int64_t i = 0; i < lines_; i++) __builtin_prefetch(line_[i] = address_ + offset_of_line(i));
    if (rest() > 0) __builtin_prefetch(address_ + bytes_ - 1);
  }

  uint64_t hash() const {
    Hash hash;
    for (int64_t i = 0; i < lines_; i++) hash.add(line_[i], kLine);
    if (numbers_ > 0 && is_dense_) {
      if (rest() > 0) hash.add(address_ + lines_ * kLine, rest());
    } else {
      for (int64_t i = 0; i < std::min(kSingles, numbers_); i++) hash.add(address_ + single(i), item_);
    }
    return hash.of_all();
  }

 private:
  // Words go to eight sums in turn, each a bijection of every word in it, so that one changed word always shows.
  struct Hash {
    void add(const char* bytes, int64_t count) {
      uint64_t words[kLine / 8] = {};
      if (count == kLine) std::memcpy(words, bytes, kLine);
      else std::memcpy(words, bytes, static_cast<size_t>(count));
      for (int64_t i = 0; i < kLine / 8; i++) sums[i] = with(sums[i], words[i]);
    }

    uint64_t of_all() const {
      uint64_t hash = 0;
      for (const uint64_t sum : sums) hash = with(hash, sum);
      return hash;
    }

    static uint64_t with(uint64_t sum, uint64_t word) { return std::rotl(sum ^ word, 29) * 0x9E3779B97F4A7C15u; }

    uint64_t sums[kLine / 8] = {};
  };

  static uint64_t mixed(uint64_t x) {
    x *= 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }

  // A place at random in each of several equal parts of less than 2⁴⁰ places.
  template <int64_t kParts>
  int64_t within(int64_t part, int64_t places) const {
    const auto fraction = static_cast<int64_t>((random_ >> (10 * (part % 6))) % 1024);
    return (part * 1024 + fraction) * places / (1024 * kParts);
  }

  // The bytes behind the lines of a small tensor.
  int64_t rest() const { return lines_ < kLines ? bytes_ - lines_ * kLine : 0; }

  // The offset of a line from the beginning; those between begin where lines of the cache do.
  int64_t offset_of_line(int64_t i) const {
    if (bytes_ <= kLines * kLine) return i * kLine;
    if (i == 0) return 0;
    if (i == kLines - 1) return bytes_ - kLine;
    const auto skipped = kLine - static_cast<int64_t>(reinterpret_cast<uintptr_t>(address_) % kLine);
    return skipped + kLine * within<kBetween>(i - 1, (bytes_ - kLine - skipped) / kLine);
  }

  // The offset of a number, the first and the last among them.
  int64_t single(int64_t i) const {
    int64_t number = numbers_ <= kSingles ? i : within<kSingles>(i, numbers_), offset = 0;
    if (i == 0) number = 0;
    if (i == kSingles - 1) number = numbers_ - 1;
    for (int64_t axis = layout_.dim - 1; axis >= 0; axis--) {
      offset += number % layout_.sizes[axis] * layout_.strides[axis];
      number /= layout_.sizes[axis];
    }
    return offset * item_;
  }

  Layout layout_;
  const char* address_;
  int64_t item_;
  int64_t numbers_ = 1, bytes_;
  bool is_dense_;
  uint64_t random_;
  int64_t lines_ = 0;
  const char* line_[kLines];
};

constexpr int64_t kLinesOfTensor = 4;  // of the cache, that the object of a tensor in C++ spans

// Versions and layouts of tensors, and hashes of a part of the numbers of each on a CPU; of None a mark.
struct Contents {
  explicit Contents(const py::list& tensors) {
    layouts.reserve(8 * tensors.size());
    versions.reserve(tensors.size());
    std::vector<Sample> samples;
    samples.reserve(tensors.size());
    Attribute implementation("_cdata");
    Version version;
    std::vector<int64_t> pointers;
    pointers.reserve(tensors.size());
    // Where the caches are cold, objects are loaded together rather than each when it is asked.
    for (const py::handle each : tensors) __builtin_prefetch(each.ptr());
    for (const py::handle each : tensors) {
      pointers.push_back(each.is_none() ? 0 : implementation.of(each.ptr()));
      const auto* object = reinterpret_cast<const char*>(pointers.back());
      for (int64_t i = 0; i < kLinesOfTensor; i++) __builtin_prefetch(object + i * Sample::kLine);
    }
    for (size_t i = 0; i < pointers.size(); i++) {
      const py::handle each = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
      if (each.is_none()) {
        layouts.push_back(std::numeric_limits<int64_t>::min());
        continue;
      }
      versions.push_back(version.of(each.ptr()));
      const Layout layout(pointers[i]);
      layout.append_to(layouts);
      if (layout.device == aoti_torch_device_type_cpu()) samples.emplace_back(layout, samples.size());
    }
    hashes.reserve(samples.size());
    for (const Sample& sample : samples) hashes.push_back(sample.hash());
  }

  Facts layouts, versions;
  std::vector<uint64_t> hashes;
};

// The state of modules and tensors; see state_in_python in cvt_kernels/changes.py.
inline py::tuple state(const py::list& members, const py::list& modules, const py::list& spaces, const py::str& own,
                       const py::list& hooks, const py::set& ignored, const py::tuple& items, const py::tuple& attributes, const py::list& tensors) {
  Facts facts;
  facts.reserve(4 * members.size() + 3 * modules.size());
  add_identities(members, facts);
  for (const py::handle module : modules) facts.push_back(reinterpret_cast<int64_t>(Py_TYPE(module.ptr())));
  add_attributes(spaces, own, facts);
  add_hooks(hooks, ignored, facts);
  facts.push_back(are_same(items, &item_or_none));
  facts.push_back(are_same(attributes, &attribute_or_none));
  const Contents contents(tensors);
  return py::make_tuple(bytes_of(facts), bytes_of(contents.layouts), bytes_of(contents.versions), bytes_of(contents.hashes));
}

// Whether a tensor of the stable ABI is the address of such a pointer.
inline bool holds_pointer(int64_t pointer, const Tensor& tensor) {
  return *reinterpret_cast<const int64_t*>(tensor.get()) == pointer;
}

}  // namespace cvt_kernels::snapshots
