// Operators along an axis that has values behind it: for some of these at a time, its columns, memory is read in order.
#pragma once

#include <algorithm>

#include "operator.h"

namespace gluon_amp {

// How many values lie behind one along an axis: 1 for the last one.
inline int64_t values_behind(const Tensor& data, int axis) {
  int64_t product = 1;
  for (int i = (axis < 0 ? axis + data.ndim : axis) + 1; i < data.ndim; ++i) product *= data.shape[i];
  return product;
}

// Run a function for up to `width` columns at a time, on all threads, with where they begin and how many they are. A
// column has `length` values that are `distance` apart; a thread takes about `range` values at once.
template <class Run>
void for_columns(const Tensor& data, int64_t length, int64_t distance, int64_t width, int64_t range, const Run& run) {
  if (!data.size()) return;
  const int64_t slices = data.size() / (length * distance), blocks = (distance + width - 1) / width;
  const int64_t values = length * std::min(width, distance);
  parallel_ranges(slices * blocks, std::max<int64_t>(1, range / values), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % blocks * width;
      run(i / blocks * length * distance + first, std::min(width, distance - first));
    }
  });
}

}  // namespace gluon_amp
