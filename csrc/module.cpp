// Schemas and registration of the operators, through torch's stable ABI: one binary serves every torch from 2.11 on.
// The Python module `_C` itself holds the facts of its build and nothing else.

#include <pybind11/pybind11.h>

#include <torch/csrc/stable/library.h>

#include "operators.h"

STABLE_TORCH_LIBRARY(cvt_kernels, m) {
  m.def(
      "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, str activation) -> "
      "(Tensor out, Tensor mean, Tensor rstd)");
  m.def(
      "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> "
      "(Tensor h, Tensor out, Tensor mean, Tensor rstd)");
  m.def("layer_norm_inference(Tensor x, Tensor? weight, Tensor? bias, float eps, str activation) -> Tensor");
  m.def(
      "add_layer_norm_inference(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> "
      "(Tensor h, Tensor out)");
  m.def(
      "layer_norm_backward(Tensor dout, Tensor? dh, Tensor h, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
      "str activation) -> (Tensor dx, Tensor dweight, Tensor dbias)");
  m.def("gelu(Tensor x, Tensor? bias, str activation) -> Tensor");
  m.def("gelu_backward(Tensor dout, Tensor x, Tensor? bias, str activation) -> (Tensor dx, Tensor dbias)");
}

STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CPU, m) {
  m.impl("layer_norm", TORCH_BOX(&cvt_kernels::layer_norm));
  m.impl("add_layer_norm", TORCH_BOX(&cvt_kernels::add_layer_norm));
  m.impl("layer_norm_inference", TORCH_BOX(&cvt_kernels::layer_norm_inference));
  m.impl("add_layer_norm_inference", TORCH_BOX(&cvt_kernels::add_layer_norm_inference));
  m.impl("layer_norm_backward", TORCH_BOX(&cvt_kernels::layer_norm_backward));
  m.impl("gelu", TORCH_BOX(&cvt_kernels::gelu));
  m.impl("gelu_backward", TORCH_BOX(&cvt_kernels::gelu_backward));
}

#ifdef CVT_KERNELS_CUDA
STABLE_TORCH_LIBRARY_IMPL(cvt_kernels, CUDA, m) {
  m.impl("layer_norm", TORCH_BOX(&cvt_kernels::cuda::layer_norm));
  m.impl("add_layer_norm", TORCH_BOX(&cvt_kernels::cuda::add_layer_norm));
  m.impl("layer_norm_inference", TORCH_BOX(&cvt_kernels::cuda::layer_norm_inference));
  m.impl("add_layer_norm_inference", TORCH_BOX(&cvt_kernels::cuda::add_layer_norm_inference));
  m.impl("layer_norm_backward", TORCH_BOX(&cvt_kernels::cuda::layer_norm_backward));
  m.impl("gelu", TORCH_BOX(&cvt_kernels::cuda::gelu));
  m.impl("gelu_backward", TORCH_BOX(&cvt_kernels::cuda::gelu_backward));
}
#endif

PYBIND11_MODULE(_C, m) {
  m.doc() = "What cvt_kernels was compiled with; importing it registers the operators torch.ops.cvt_kernels.*.";
  m.attr("version") = CVT_KERNELS_VERSION;
  m.attr("cuda") = CVT_KERNELS_CUDA_VERSION;  // of the toolkit; empty without CUDA kernels
  m.attr("architectures") = CVT_KERNELS_ARCHITECTURES;  // as in "sm_80,sm_90,compute_90"
  m.attr("compiler") = CVT_KERNELS_COMPILER;
}
