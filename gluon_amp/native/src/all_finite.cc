// Whether all values of many arrays are finite: 1 or 0, on all threads, at the speed of memory.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "families.h"
#include "operator.h"
#include "vector.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 65536;
constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

// Of values that are not negative, bits grow with the value; those of what is not a number are above infinity's.
VECTORIZED int32_t largest_bits(const float* values, int64_t count) {
  int32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    largest = std::max(largest, bits & kMagnitude);
  }
  return largest;
}

void forward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  std::atomic<bool> finite{true};
  for (const Tensor& array : inputs) {
    parallel_ranges(array.size(), kRange, [&](int64_t begin, int64_t end) {
      if (largest_bits(array.as<const float>() + begin, end - begin) >= kInfinity) finite = false;
    });
  }
  *outputs[0].as<float>() = finite ? 1 : 0;
}

Arity arity(const Attributes& attributes) { return {attributes.count("num_arrays"), 1}; }

void types(const Attributes&, Types& inputs, Types& outputs) {
  for (int& type : inputs) expect_type(type, kFloat32, "an array");
  expect_type(outputs[0], kFloat32, "the output");
}

void shapes(const Attributes&, Shapes& inputs, Shapes& outputs) {
  for (const Shape& shape : inputs) expect_known(shape, "an array");
  outputs[0] = {1};
}

}  // namespace

const Operator all_finite{"_gluon_amp_all_finite", arity, types, shapes, forward};

}  // namespace gluon_amp
