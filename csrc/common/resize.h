// Bilinear interpolation along one side of an image, as F.interpolate has it without align_corners.
#pragma once

#include "common/scalar.h"

namespace cvt_kernels {
namespace {

// The neighbors of number i of `to` among the `from` numbers that are resized to them, and their weights. They are computed
// in float as in F.interpolate, so that the same neighbors have no weight: of these NaN comes all the same.
struct Place {
  int64_t at, next;
  float weight, next_weight;
};

inline Place place_of(int64_t i, int64_t to, int64_t from) {
  if (from == to) return {i, i, 1, 0};
  const float scale = static_cast<float>(from) / static_cast<float>(to);
  const float center = at_least(scale * (static_cast<float>(i) + 0.5f) - 0.5f, 0.0f);
  const int64_t at = at_most(static_cast<int64_t>(center), from - 1);
  const float next_weight = center - static_cast<float>(at);
  return {at, at_most(at + 1, from - 1), 1 - next_weight, next_weight};
}

}  // namespace
}  // namespace cvt_kernels
