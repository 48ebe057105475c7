// What hundreds of Python objects were, in one call each: as bytes that are equal as long as nothing has changed, or as a
// flag. cvt_kernels/structure.py has the same functions in Python, for where this extension was not built.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "common/pybind.h"
#include "common/tensors.h"
#include "snapshots/sample.h"

namespace cvt_kernels::snapshots {

namespace py = pybind11;

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
inline py::bytes identities(const py::list& dicts) {
  std::vector<uintptr_t> found;
  found.reserve(2 * dicts.size());
  for (const py::handle dict : dicts) {
    found.push_back(static_cast<uintptr_t>(PyDict_GET_SIZE(dict_of(dict))));
    PyObject* value;
    for (Py_ssize_t place = 0; PyDict_Next(dict.ptr(), &place, nullptr, &value);) {
      found.push_back(reinterpret_cast<uintptr_t>(value));
    }
  }
  return bytes_of(found);
}

// The class of each object.
inline py::bytes classes(const py::list& objects) {
  std::vector<PyTypeObject*> found;
  found.reserve(objects.size());
  for (const py::handle object : objects) found.push_back(Py_TYPE(object.ptr()));
  return bytes_of(found);
}

// The number of items of each dict.
inline py::bytes sizes(const py::list& dicts) {
  std::vector<Py_ssize_t> found;
  found.reserve(dicts.size());
  for (const py::handle dict : dicts) found.push_back(PyDict_GET_SIZE(dict_of(dict)));
  return bytes_of(found);
}

// Whether one of the dicts has an item.
inline bool any_full(const py::list& dicts) {
  for (const py::handle dict : dicts) {
    if (PyDict_GET_SIZE(dict_of(dict)) != 0) return true;
  }
  return false;
}

// Whether each dict has an item of that name, a byte each.
inline py::bytes having(const py::list& dicts, const py::str& name) {
  std::vector<char> found;
  found.reserve(dicts.size());
  for (const py::handle dict : dicts) found.push_back(item_of(dict, name) != nullptr);
  return bytes_of(found);
}

// Whether one of the dicts has a true item of that name.
inline bool any_item(const py::list& dicts, const py::str& name) {
  for (const py::handle dict : dicts) {
    PyObject* item = item_of(dict, name);
    const int is_true = item == nullptr ? 0 : PyObject_IsTrue(item);
    if (is_true < 0) throw py::error_already_set();
    if (is_true != 0) return true;
  }
  return false;
}

// Whether the items of these dicts and names are, or equal, these values; None stands for an item that is not there.
inline bool same_items(const py::list& dicts, const py::list& names, const py::list& values) {
  if (names.size() != dicts.size() || values.size() != dicts.size()) throw py::value_error("expected lists of one length");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dicts.ptr()); i++) {
    PyObject* value = PyList_GET_ITEM(values.ptr(), i);
    PyObject* item = item_of(PyList_GET_ITEM(dicts.ptr(), i), PyList_GET_ITEM(names.ptr(), i));
    if (item == value || (item == nullptr && value == Py_None)) continue;
    const py::object held = py::reinterpret_borrow<py::object>(item == nullptr ? Py_None : item);
    const int is_same = PyObject_RichCompareBool(held.ptr(), value, Py_EQ);
    if (is_same < 0) throw py::error_already_set();
    if (is_same == 0) return false;
  }
  return true;
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

// Address, dtype, sizes and strides of each tensor, one after the other.
inline py::bytes layouts(const py::list& tensors) {
  std::vector<int64_t> found;
  found.reserve(8 * tensors.size());
  Attribute implementation("_cdata");
  for (const py::handle each : tensors) Layout(implementation.of(each.ptr())).append_to(found);
  return bytes_of(found);
}

constexpr int64_t kLinesOfTensor = 4;  // of the cache, that the object of a tensor in C++ spans

// Version and layout of each tensor or None, and a hash of a part of the numbers of each.
inline py::tuple contents(const py::list& tensors) {
  std::vector<int64_t> found;
  std::vector<Sample> samples;
  found.reserve(8 * tensors.size());
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
      found.push_back(std::numeric_limits<int64_t>::min());
      continue;
    }
    found.push_back(version.of(each.ptr()));
    const Layout layout(pointers[i]);
    layout.append_to(found);
    if (layout.device != aoti_torch_device_type_cpu()) continue;
    const auto item = static_cast<int64_t>(aoti_torch_dtype_element_size(layout.dtype));
    samples.emplace_back(layout.address, item, layout.dim, layout.sizes, layout.strides, samples.size());
  }
  std::vector<uint64_t> hashes;
  hashes.reserve(samples.size());
  for (const Sample& sample : samples) hashes.push_back(sample.hash());
  return py::make_tuple(bytes_of(found), bytes_of(hashes));
}

// Whether a tensor of the stable ABI is the address of such a pointer.
inline bool holds_pointer(int64_t pointer, const Tensor& tensor) {
  return *reinterpret_cast<const int64_t*>(tensor.get()) == pointer;
}

inline void define(py::module_& m) {
  m.def("identities", &identities, "Returns the identities of the values of dicts.");
  m.def("classes", &classes, "Returns the classes of objects.");
  m.def("sizes", &sizes, "Returns the numbers of items of dicts.");
  m.def("any_full", &any_full, "Returns whether one of the dicts is not empty.");
  m.def("having", &having, "Returns which dicts have an item of a name.");
  m.def("any_item", &any_item, "Returns whether one of the dicts has a true item of a name.");
  m.def("same_items", &same_items, "Returns whether items of dicts are what they were.");
  m.def("layouts", &layouts, "Returns address, dtype, sizes and strides of tensors.");
  m.def("contents", &contents, "Returns versions and layouts of tensors, and hashes of parts of their numbers.");
}

}  // namespace cvt_kernels::snapshots
