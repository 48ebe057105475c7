// Schemas and registration of the operators, through torch's stable ABI: one binary serves every torch from 2.11 on.
// The Python module `_C` itself holds the facts of its build, a switch for autotuning, and what snapshots of models ask.

#include "common/workspace.h"
#include "snapshots/objects.h"

STABLE_TORCH_LIBRARY(cvt_kernels, m) {
  // layer_norm_gelu/, on the CPU and on the GPU. An activation is "identity" or one of GELU's "none", "tanh" and
  // "quick"; mean and rstd are accumulators (common/half.h), one per row.
  //
  // out = activation(layer_norm(x)) in `dtype`; without mean and rstd where no gradient is wanted, and then of x + shift
  // if there is a shift (channels,). On the GPU a shift goes with the identity alone. `served` says that on a CPU the threads of
  // served models compute it.
  m.def(
      "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, str activation, ScalarType dtype) -> "
      "(Tensor out, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_inference(Tensor x, Tensor? weight, Tensor? bias, float eps, str activation, ScalarType dtype, "
      "Tensor? shift=None, bool served=False) -> Tensor");
  // h = x + residual in the dtype of residual, out = layer_norm(h) in `dtype`, which is x's.
  m.def(
      "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, ScalarType dtype) -> "
      "(Tensor h, Tensor out, Tensor mean, Tensor rstd)");
  m.def(
      "add_layer_norm_inference(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, ScalarType dtype) "
      "-> (Tensor h, Tensor out)");
  // The gradients of all four; dh is added to dx, and dbranch is dx in the dtype of dout, empty unless it is asked for.
  // The gradient of an absent parameter is empty, here and below.
  m.def(
      "layer_norm_backward(Tensor dout, Tensor? dh, Tensor h, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
      "str activation, bool with_dbranch) -> (Tensor dx, Tensor dbranch, Tensor dweight, Tensor dbias)");
  // activation(x + bias).
  m.def("gelu(Tensor x, Tensor? bias, str activation) -> Tensor");
  m.def("gelu_backward(Tensor dout, Tensor x, Tensor? bias, str activation) -> (Tensor dx, Tensor dbias)");

  // rows/, on the CPU: tokens of x at `rows`, int64 (batch, count), which are unique for an image but for negative ones. Of
  // those zeros are gathered, and nothing is scattered. Others that x does not have are refused.
  m.def("gather_rows(Tensor x, Tensor rows) -> Tensor");
  // x, or zeros in the place of `tokens` tokens, with values at the rows, or zeros; the second in the place of x.
  m.def("scatter_rows(Tensor? x, Tensor rows, Tensor? values, SymInt tokens) -> Tensor");
  m.def("scatter_rows_(Tensor(a!) x, Tensor rows, Tensor values) -> ()");

  // attention/, on the CPU: softmax(scale · q kᵀ) v for q (B, Nq, h, D), k and v (B, Nkv, h, D).
  m.def("attention_inference(Tensor q, Tensor k, Tensor v, float scale) -> Tensor");

  // The same with the biases of a table (heads, H + s (Hk - 1), W + s (Wk - 1)) for the offsets from keys to queries, in
  // accumulators; `rows` (B, Nq) are the tokens of the queries where there is not one for each (reference.py).
  m.def(
      "attention_by_position(Tensor q, Tensor k, Tensor v, float scale, Tensor table, Tensor? rows, SymInt key_height, "
      "SymInt key_width, int stride) -> Tensor");

  // conv_projection/, on the CPU: for each branch BatchNorm(depthwise convolution of x) by the running statistics. x is
  // tokens, of a height × width grid after a class token or none; `norms` are the scale, shift, mean and variance of
  // each branch, `geometry` its stride, padding and dilation. `summands` is for each branch how many from it on are summed
  // to one output, 0 where a branch before has it in its sum; without them each is an output.
  m.def(
      "conv_projection_inference(Tensor x, SymInt height, SymInt width, Tensor[] weights, Tensor?[] norms, int[] geometry, "
      "float[] eps, int[] summands=[]) -> Tensor[]");

  // Mean and variance (biased) of each branch's convolution over the batch, in accumulators. The gradients of the above:
  // `norms` are the scale, mean and variance of each branch, in accumulators as are the gradients of scale and shift;
  // `constant` says whether mean and variance are constants, as in evaluation, or batch statistics; `douts` has the
  // gradient of an output for each branch of its sum.
  m.def(
      "conv_projection_moments(Tensor x, SymInt height, SymInt width, Tensor[] weights, int[] geometry) -> "
      "(Tensor[] means, Tensor[] variances)");
  m.def(
      "conv_projection_gradients(Tensor[] douts, Tensor x, SymInt height, SymInt width, Tensor[] weights, Tensor?[] norms, "
      "int[] geometry, float[] eps, int[] constant, int[] summands=[]) -> "
      "(Tensor dx, Tensor[] dweights, Tensor[] dscales, Tensor[] dshifts)");

  // depthwise_conv_gelu/, on the CPU: activation(convolution + bias) of the tokens of a height × width grid, where weight is
  // (channels, 1, 3, 3) and the activation one of GELU, and its gradients.
  m.def(
      "depthwise_conv_gelu(Tensor x, SymInt height, SymInt width, Tensor weight, Tensor? bias, str activation) -> Tensor");
  m.def(
      "depthwise_conv_gelu_backward(Tensor dout, Tensor x, SymInt height, SymInt width, Tensor weight, Tensor? bias, "
      "str activation) -> (Tensor dx, Tensor dweight, Tensor dbias)");

  // linear/, on the CPU: packs a weight (outputs, inputs) for the operators below.
  m.def("pack_linear(Tensor weight) -> Tensor");

  // linear_int8/, on the CPU. The first three round rows of x, LayerNorm of x + shift, or GELU of x + bias to int8, each with
  // a scale of its own; vectors are float32. The last computes a linear layer with a weight that
  // pack_linear_int8 has packed, on rows of float or on int8 with scales.
  m.def("quantize_rows(Tensor x) -> (Tensor values, Tensor scales)");
  m.def(
      "layer_norm_quantize(Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor? shift) -> "
      "(Tensor values, Tensor scales)");
  m.def("gelu_quantize(Tensor x, Tensor? bias, str activation) -> (Tensor values, Tensor scales)");
  m.def("pack_linear_int8(Tensor weight) -> Tensor");
  m.def(
      "linear_int8_packed(Tensor x, Tensor? x_scales, Tensor packed, Tensor weight_scale, Tensor? bias, Tensor? residual, "
      "str activation, ScalarType dtype) -> Tensor");

  // transformer_block/, on the CPU. The first packs a depthwise convolution with the scale, shift, mean and variance of its
  // BatchNorm. The second computes a block in the place of x, tokens as above: `packed` are the convolutions and the linear
  // layers of Q, K and V, then proj, fc1 and fc2; `vectors`, in float32, are weight and bias of both LayerNorms and the
  // biases of the linear layers; `geometry` is kernel, stride, padding and dilation of Q, K and V; `widths` are the channels
  // of all heads, the hidden channels and the number of heads. `weight_scales` are the output scales of layers that
  // pack_linear_int8 has packed, and empty for others.
  // `rows` (batch, rows), int64, are the tokens that are computed, of an image ascending, then -1; `scores` (batch,
  // keys), float32, takes how much the class token (`query` is "cls") or the mean query of the other tokens ("avg")
  // attends to each key.
  m.def(
      "pack_convolution(Tensor weight, Tensor scale, Tensor shift, Tensor mean, Tensor variance, float eps) -> Tensor");
  m.def(
      "transformer_block_(Tensor(a!) x, SymInt height, SymInt width, Tensor[] packed, Tensor[] vectors, int[] geometry, "
      "int[] widths, Tensor[] weight_scales, float eps1, float eps2, float scale, str activation, "
      "Tensor? rows=None, Tensor(b!)? scores=None, str query=\"\") -> ()");

  // The same for blocks of SegFormer and PVT. The first packs a depthwise 3×3 convolution. The second computes a block on
  // tokens in rows of an image: `packed` are the linear layers of Q, K and V, then proj, fc1 and fc2; `reduction` one for each row of the
  // weight (channels, channels, r, r), with the inputs of that row in the order column, channel, or none. `vectors`, in
  // float32, are weight and bias of both LayerNorms and the biases of the linear layers, then bias of the reduction and
  // weight and bias of its LayerNorm; `eps` are the LayerNorms'; `widths`,
  // `weight_scales` as above. `rows` too, where there is no convolution; other tokens of the result are those of x.
  m.def("pack_depthwise(Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "pyramid_block_packed(Tensor x, SymInt height, SymInt width, Tensor[] packed, Tensor[] reduction, Tensor? conv, "
      "Tensor[] vectors, int[] widths, Tensor[] weight_scales, float[] eps, float scale, "
      "str activation, Tensor? rows=None) -> Tensor");

  // conv_embedding/, on the CPU: the class token, if there is one, and layer_norm(conv(image)) as tokens. `packed` is the
  // weight (channels, inputs), its inputs in the order kernel, kernel, in_channels; vectors are float32.
  m.def(
      "conv_embedding_inference(Tensor image, Tensor packed, Tensor bias, Tensor norm_weight, Tensor norm_bias, "
      "Tensor? class_token, int kernel, int stride, int padding, float eps) -> Tensor");

  // segmentation_head/, on the CPU: classifier(relu(sum of the products of the maps + bias)) of each pixel of the first map
  // as tokens (batch, pixels, classes), where the products of the other maps are resized to it. `maps` are (batch, height,
  // width, channels); both biases are float32.
  m.def(
      "segmentation_head_packed(Tensor[] maps, Tensor[] packed, Tensor bias, Tensor classifier, Tensor classifier_bias) "
      "-> Tensor");

  // The largest class (batch, height, width), int64, of each pixel of logits (batch, h, w, classes)
  // that are resized to height × width.
  m.def("resized_argmax(Tensor logits, SymInt height, SymInt width) -> Tensor");

  // depth_head/, on the CPU: max_depth · sigmoid(conv(relu(conv(upsample(x))))), (batch, 4 height, 4 width). `taps` are those of
  // the first convolution, (channels, 9, inputs), `last` those of the other one, (channels, 9); both and `bias` are float32.
  m.def(
      "depth_head_packed(Tensor x, Tensor taps, Tensor bias, Tensor last, float last_bias, float max_depth) -> Tensor");

  // snapshots/: whether a tensor is the address of this pointer.
  m.def("holds_pointer(int pointer, Tensor tensor) -> bool");
}

IMPLEMENT("holds_pointer", cvt_kernels::snapshots::holds_pointer)

PYBIND11_MODULE(_C, m) {
  m.doc() = "What cvt_kernels was compiled with; importing it registers the operators torch.ops.cvt_kernels.*.";
  m.attr("version") = CVT_KERNELS_VERSION;
  m.attr("cuda") = CVT_KERNELS_CUDA_VERSION;  // of the toolkit; empty without CUDA kernels
  m.attr("architectures") = CVT_KERNELS_ARCHITECTURES;  // as in "sm_80,sm_90,compute_90"
  m.attr("cuda_request") = CVT_KERNELS_CUDA_REQUEST;  // CVT_KERNELS_CUDA of the build: auto, 0 or 1
  m.attr("cpu_sets") = CVT_KERNELS_CPU_SETS;  // the instruction sets that loops were compiled for, as in " plain avx2 "
  m.attr("compiler") = CVT_KERNELS_COMPILER;
  m.def("dispatch_allocations", [](bool enabled) { cvt_kernels::dispatches_allocations = enabled; },
        "Lets the operators allocate through PyTorch's dispatcher, where Python can watch, instead of directly.");
  m.def("workspace_bytes", [] { return cvt_kernels::WorkspacePool::instance().held(); },
        "Returns the bytes that the operators of the CPU keep for later calls.");
  m.def("release_workspace", [] { cvt_kernels::WorkspacePool::instance().release(); },
        "Frees the memory that the operators of the CPU keep for later calls and that none uses now.");
  m.def("state", &cvt_kernels::snapshots::state, "Returns the state of modules and tensors.");
}
