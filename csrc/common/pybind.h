// pybind11 as torch brings it along. torch 2.11 refuses to share it with users of the stable ABI, which has nothing to do
// with it.
#pragma once

#pragma push_macro("TORCH_TARGET_VERSION")
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>
#pragma pop_macro("TORCH_TARGET_VERSION")
