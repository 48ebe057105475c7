// Launches of compiled kernels by the CUDA driver, with all but the stream and the addresses of tensors known in advance.
// cvt_kernels/ops/prepared_launches.py makes them, and starts kernels through Triton where this extension was not built.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/pybind.h"

namespace cvt_kernels::launches {

namespace py = pybind11;

// What the driver takes, as in cuda.h, which builds without CUDA do not have. A test compares.
struct Attribute {
  uint32_t id;
  uint32_t padding;
  alignas(8) unsigned char value[64];
};

struct Config {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  void* stream;
  Attribute* attributes;
  uint32_t attribute_count;
};

constexpr uint32_t kProgrammaticStreamSerialization = 6;
constexpr size_t kTensorMapBytes = 128;
constexpr size_t kTensorMapAlignment = 128;

// The functions of the driver, of the library that Triton has loaded.
class Driver {
 public:
  int (*launch)(const Config*, void* function, void** parameters, void** extra);
  int (*current_context)(void** context);
  int (*set_context)(void* context);
  int (*error_string)(int error, const char** text);
  int (*replace_address)(void* tensor_map, void* address);  // null before CUDA 12

  static const Driver& instance() {
    static const Driver driver;
    return driver;
  }

  void check(int error, const std::string& what) const {
    if (error == 0) return;
    const char* text = nullptr;
    error_string(error, &text);
    throw std::runtime_error(what + ": " + (text == nullptr ? "an unknown error" : text) + " (CUDA error " +
                             std::to_string(error) + ")");
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (library == nullptr) throw std::runtime_error("there is no CUDA driver, libcuda.so.1");
    find(library, "cuLaunchKernelEx", launch);
    find(library, "cuCtxGetCurrent", current_context);
    find(library, "cuCtxSetCurrent", set_context);
    find(library, "cuGetErrorString", error_string);
    replace_address = reinterpret_cast<decltype(replace_address)>(dlsym(library, "cuTensorMapReplaceAddress"));
  }

  template <class Function>
  static void find(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    if (function == nullptr) throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  }
};

// A parameter of a kernel: `bytes` are a constant, with an address in its place if it is a pointer or a tensor map.
enum class Kind { kConstant, kPointer, kTensorMap };

// A kernel that a call starts with a stream and addresses. Calls of several threads may overlap.
class Launch {
 public:
  static constexpr size_t kMostBytes = 4096;  // of parameters, for every GPU
  static constexpr size_t kMostParameters = 256;

  Launch(std::string name, uintptr_t function, std::array<int64_t, 3> grid, int64_t threads, int64_t shared_bytes,
         bool overlaps)
      : name_(std::move(name)), function_(reinterpret_cast<void*>(function)) {
    for (int i = 0; i < 3; i++) {
      check_range("grid", grid[i], 1, i == 0 ? INT32_MAX : UINT16_MAX);
      config_.grid[i] = static_cast<uint32_t>(grid[i]);
    }
    if (function == 0) throw py::value_error("function: got 0, expected a handle of the driver");
    check_range("threads", threads, 1, 1024);
    check_range("shared_bytes", shared_bytes, 0, INT32_MAX);
    config_.block[0] = static_cast<uint32_t>(threads);
    config_.block[1] = config_.block[2] = 1;
    config_.shared_bytes = static_cast<uint32_t>(shared_bytes);
    attribute_.id = kProgrammaticStreamSerialization;
    attribute_.value[0] = 1;
    config_.attribute_count = overlaps ? 1 : 0;
    Driver::instance().check(Driver::instance().current_context(&context_), "cuCtxGetCurrent");
  }

  void add(Kind kind, const std::string& bytes) {
    const bool is_map = kind == Kind::kTensorMap;
    if (is_map && Driver::instance().replace_address == nullptr) {
      throw std::runtime_error("the CUDA driver has no cuTensorMapReplaceAddress");
    }
    if (bytes.empty() || (is_map ? bytes.size() != kTensorMapBytes : bytes.size() > 8)) {
      throw py::value_error("parameter: got " + std::to_string(bytes.size()) + " bytes, expected " +
                            (is_map ? "128" : "1 to 8"));
    }
    const size_t alignment = is_map ? kTensorMapAlignment : 8;
    const size_t offset = (storage_.size() + alignment - 1) / alignment * alignment;
    if (offset + bytes.size() > kMostBytes || offsets_.size() == kMostParameters) {
      throw py::value_error("parameters: got more than " + std::to_string(kMostBytes) + " bytes or " +
                            std::to_string(kMostParameters) + " parameters");
    }
    storage_.resize(offset + bytes.size());
    std::memcpy(storage_.data() + offset, bytes.data(), bytes.size());
    offsets_.push_back(offset);
    if (kind != Kind::kConstant) addresses_.push_back({offset, is_map});
  }

  [[nodiscard]] size_t address_count() const { return addresses_.size(); }

  // Starts the kernel. `arguments` are the stream and the addresses, numbers of Python.
  void start(PyObject* const* arguments) const {
    alignas(kTensorMapAlignment) std::byte storage[kMostBytes];
    void* parameters[kMostParameters];
    std::memcpy(storage, storage_.data(), storage_.size());
    const Driver& driver = Driver::instance();
    Attribute attribute = attribute_;
    Config config = config_;
    config.attributes = &attribute;
    config.stream = reinterpret_cast<void*>(number(arguments[0]));
    for (size_t i = 0; i < addresses_.size(); i++) {
      const uintptr_t address = number(arguments[1 + i]);
      const auto& [offset, is_map] = addresses_[i];
      if (is_map) {
        driver.check(driver.replace_address(storage + offset, reinterpret_cast<void*>(address)), "tensor map of " + name_);
      } else {
        std::memcpy(storage + offset, &address, sizeof address);
      }
    }
    for (size_t i = 0; i < offsets_.size(); i++) parameters[i] = storage + offsets_[i];
    PyThreadState* thread = PyEval_SaveThread();  // a full queue of launches blocks
    const int error = start_in_context(driver, config, parameters);
    PyEval_RestoreThread(thread);
    driver.check(error, name_);
  }

 private:
  static void check_range(const char* what, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return;
    throw py::value_error(std::string(what) + ": got " + std::to_string(value) + ", expected " + std::to_string(least) +
                          " to " + std::to_string(most));
  }

  static uintptr_t number(PyObject* object) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(object);
    if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred()) throw py::error_already_set();
    return static_cast<uintptr_t>(value);
  }

  // A new thread has no context yet.
  int start_in_context(const Driver& driver, const Config& config, void** parameters) const {
    void* context = nullptr;
    int error = driver.current_context(&context);
    if (error == 0 && context == nullptr) error = driver.set_context(context_);
    return error != 0 ? error : driver.launch(&config, function_, parameters, nullptr);
  }

  struct Address {
    size_t offset;
    bool is_map;
  };

  std::string name_;
  void* function_;
  void* context_ = nullptr;
  Config config_{};
  Attribute attribute_{};
  std::vector<std::byte> storage_;
  std::vector<size_t> offsets_;
  std::vector<Address> addresses_;
};

inline PyObject* start(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const auto* launch = static_cast<const Launch*>(PyCapsule_GetPointer(self, nullptr));
  if (static_cast<size_t>(count) != 1 + launch->address_count()) {
    PyErr_Format(PyExc_TypeError, "got %zd arguments, expected a stream and %zu addresses", count, launch->address_count());
    return nullptr;
  }
  try {
    launch->start(arguments);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// Returns the function of a launch, without pybind11's search of overloads, which would take longer than the launch.
inline py::object prepare_launch(const std::string& name, uintptr_t function,
                                 const std::tuple<int64_t, int64_t, int64_t>& grid, int64_t threads, int64_t shared_bytes,
                                 bool overlaps, const py::list& parameters) {
  const auto [x, y, z] = grid;
  auto launch = std::make_unique<Launch>(name, function, std::array{x, y, z}, threads, shared_bytes, overlaps);
  for (const py::handle parameter : parameters) {
    const auto [kind, bytes] = parameter.cast<std::pair<char, std::string>>();
    constexpr char kinds[] = {'c', 'p', 'm'};
    const auto* known = std::find(std::begin(kinds), std::end(kinds), kind);
    if (known == std::end(kinds)) throw py::value_error("parameter: got an unknown kind, expected c, p or m");
    launch->add(static_cast<Kind>(known - kinds), bytes);
  }
  const py::capsule self(launch.release(), [](void* held) { delete static_cast<Launch*>(held); });
  static PyMethodDef method = {"start", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&start)), METH_FASTCALL,
                               "Starts a kernel: (stream, addresses...)."};
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

// Returns a tensor map with another address.
inline py::bytes moved_tensor_map(const std::string& map, uintptr_t address) {
  if (map.size() != kTensorMapBytes) {
    throw py::value_error("map: got " + std::to_string(map.size()) + " bytes, expected 128");
  }
  alignas(kTensorMapAlignment) char moved[kTensorMapBytes];
  std::memcpy(moved, map.data(), kTensorMapBytes);
  const Driver& driver = Driver::instance();
  if (driver.replace_address == nullptr) throw std::runtime_error("the CUDA driver has no cuTensorMapReplaceAddress");
  driver.check(driver.replace_address(moved, reinterpret_cast<void*>(address)), "cuTensorMapReplaceAddress");
  return {moved, kTensorMapBytes};
}

// Returns the last bytes of an object's own memory: where Triton has the tensor map in what it calls PyCUtensorMap.
inline py::bytes bytes_at_end(const py::handle& object, size_t count) {
  const auto size = static_cast<size_t>(Py_TYPE(object.ptr())->tp_basicsize);
  if (count + sizeof(PyObject) > size) {
    throw py::value_error("object: got one of " + std::to_string(size) + " bytes, expected more than " + std::to_string(count));
  }
  return {reinterpret_cast<const char*>(object.ptr()) + size - count, count};
}

inline void define(py::module_& m) {
  m.def("prepare_launch", &prepare_launch, "Returns what starts a kernel, given a stream and addresses.");
  m.def("bytes_at_end", &bytes_at_end, "Returns the last bytes of an object.");
  m.def("moved_tensor_map", &moved_tensor_map, "Returns a tensor map with another address.");
}

}  // namespace cvt_kernels::launches
