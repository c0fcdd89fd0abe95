// The means of all channels in float32, as MXNet's Pooling computes them with global_pool=True and pool_type='avg'.
#include <algorithm>

#include "families.h"
#include "operator.h"
#include "vector.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 32768;

VECTORIZED void forward_kernel(const float* data, float* means, int64_t channels, int64_t width) {
  for (int64_t channel = 0; channel < channels; ++channel, data += width) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += data[i];
    means[channel] = sum / static_cast<float>(width);
  }
}

// Run a function for ranges of channels of all images, on all threads, with the number of their values.
template <class Run>
void for_channels(const Tensor& means, const Tensor& data, const Run& run) {
  const int64_t channels = means.size(), width = channels ? data.size() / channels : 0;
  parallel_ranges(channels, std::max<int64_t>(1, kRange / std::max<int64_t>(1, width)),
                  [&](int64_t begin, int64_t end) { run(begin, end, width); });
}

void forward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  for_channels(outputs[0], inputs[0], [&](int64_t begin, int64_t end, int64_t width) {
    forward_kernel(inputs[0].as<float>() + begin * width, outputs[0].as<float>() + begin, end - begin, width);
  });
}

void backward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  const float* out_grads = inputs[0].as<float>();
  for_channels(inputs[0], outputs[0], [&](int64_t begin, int64_t end, int64_t width) {
    for (int64_t channel = begin; channel < end; ++channel)
      std::fill_n(outputs[0].as<float>() + channel * width, width, out_grads[channel] / static_cast<float>(width));
  });
}

void types(const Attributes&, Types& inputs, Types& outputs) {
  expect_type(inputs[0], kFloat32, "data");
  outputs[0] = kFloat32;
}

void shapes(const Attributes&, Shapes& inputs, Shapes& outputs) {
  const Shape& data = inputs[0];
  expect_known(data, "data");
  if (data.size() < 3) fail("expected images, channels and one axis or more, received data of shape ", describe(data));
  outputs[0] = Shape(data.size(), 1);
  std::copy_n(data.begin(), 2, outputs[0].begin());
}

Arity arity(const Attributes&) { return {1, 1}; }

}  // namespace

const Operator global_pool{"_gluon_amp_global_pool", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
