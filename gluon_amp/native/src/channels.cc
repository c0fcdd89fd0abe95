// What has one number for each channel of each image, of maps with the channels last: the means over all pixels, as
// MXNet's Pooling computes them with global_pool=True and pool_type='avg', and the channels times factors, as its
// broadcast_mul does with factors of shape (N, C, 1, 1). Means have the type of the data, factors are float32.
#include <algorithm>

#include "operator.h"

namespace gluon_amp {

namespace {

constexpr int64_t kBlock = 64;   // channels whose sums lie in the first cache
constexpr int64_t kPixels = 64;  // that are added one after the other, so that rounding does not add up

// Some channels of all pixels of an image: `channels` values that lie together, `pixels` times, `width` values apart.
// `first` is the place of the first one in the map, `number` that of its channel among those of all images.
struct Block {
  int64_t first, number, pixels, channels, width;
};

template <class Run>
void for_blocks(const Tensor& map, const Run& run) {
  const int64_t images = map.dim(0), pixels = map.dim(1) * map.dim(2), width = map.dim(3);
  const int64_t blocks = (width + kBlock - 1) / kBlock;
  for_pieces(images * blocks, 1, 1, [&](int64_t i) {
    const int64_t image = i / blocks, channel = i % blocks * kBlock;
    run(Block{image * pixels * width + channel, image * width + channel, pixels, std::min(kBlock, width - channel),
              width});
  });
}

template <class T>
INLINED void average(const T* data, T* means, const Block& block) {
  float sums[kBlock] = {};
  for (int64_t first = 0; first < block.pixels; first += kPixels) {
    float parts[kBlock] = {};
    for (int64_t end = std::min(first + kPixels, block.pixels), pixel = first; pixel < end; ++pixel)
#pragma omp simd
      for (int64_t i = 0; i < block.channels; ++i) parts[i] += to_float(data[pixel * block.width + i]);
#pragma omp simd
    for (int64_t i = 0; i < block.channels; ++i) sums[i] += parts[i];
  }
  for (int64_t i = 0; i < block.channels; ++i) store(sums[i] / static_cast<float>(block.pixels), &means[i]);
}

template <class T>
INLINED void spread(const T* grads, T* data_grad, const Block& block) {
  float shares[kBlock];
  for (int64_t i = 0; i < block.channels; ++i) shares[i] = to_float(grads[i]) / static_cast<float>(block.pixels);
  for (int64_t pixel = 0; pixel < block.pixels; ++pixel, data_grad += block.width)
#pragma omp simd
    for (int64_t i = 0; i < block.channels; ++i) store(shares[i], &data_grad[i]);
}

template <class T>
INLINED void multiply(const T* data, const float* factors, T* out, const Block& block) {
  for (int64_t pixel = 0; pixel < block.pixels; ++pixel, data += block.width, out += block.width)
#pragma omp simd
    for (int64_t i = 0; i < block.channels; ++i) store(to_float(data[i]) * factors[i], &out[i]);
}

template <class T>
INLINED void differentiate(const T* out_grad, const T* data, const float* factors, T* data_grad, float* factor_grads,
                           const Block& block) {
  float sums[kBlock] = {};
  for (int64_t first = 0; first < block.pixels; first += kPixels) {
    float parts[kBlock] = {};
    for (int64_t end = std::min(first + kPixels, block.pixels), pixel = first; pixel < end; ++pixel)
#pragma omp simd
      for (int64_t i = 0; i < block.channels; ++i) {
        const float grad = to_float(out_grad[pixel * block.width + i]);
        parts[i] += grad * to_float(data[pixel * block.width + i]);
        store(grad * factors[i], &data_grad[pixel * block.width + i]);
      }
#pragma omp simd
    for (int64_t i = 0; i < block.channels; ++i) sums[i] += parts[i];
  }
  std::copy_n(sums, block.channels, factor_grads);
}

VECTORIZED void average_block(const Tensors& in, const Tensors& out, const Block& block) {
  IN_TYPE(in[0].type, average(in[0].as<const T>() + block.first, out[0].as<T>() + block.number, block));
}
VECTORIZED void spread_block(const Tensors& in, const Tensors& out, const Block& block) {
  IN_TYPE(in[0].type, spread(in[0].as<const T>() + block.number, out[0].as<T>() + block.first, block));
}
VECTORIZED void multiply_block(const Tensors& in, const Tensors& out, const Block& block) {
  IN_TYPE(in[0].type, multiply(in[0].as<const T>() + block.first, in[1].as<float>() + block.number,
                               out[0].as<T>() + block.first, block));
}
VECTORIZED void differentiate_block(const Tensors& in, const Tensors& out, const Block& block) {
  IN_TYPE(in[0].type, differentiate(in[0].as<const T>() + block.first, in[1].as<const T>() + block.first,
                                    in[2].as<float>() + block.number, out[0].as<T>() + block.first,
                                    out[1].as<float>() + block.number, block));
}

// Run a kernel for the blocks of a map: the input or the output of a number.
template <void (*kernel)(const Tensors&, const Tensors&, const Block&), int kMap, bool kOfOutputs = false>
void compute(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  for_blocks((kOfOutputs ? outputs : inputs)[kMap], [&](const Block& block) { kernel(inputs, outputs, block); });
}

void scale_types(const Attributes& attributes, Types& inputs, Types& outputs) {
  data_types(attributes, inputs, outputs);
  expect_type(inputs[1], kFloat32, "the factors");
}

// The shape of one number for each channel of images with the channels last.
Shape of_channels(const Shape& data) {
  expect_known(data, "data");
  if (data.size() != 4) fail("expected images, received data of shape ", describe(data));
  return {data[0], data[3], 1, 1};
}

void mean_shapes(const Attributes&, Shapes& inputs, Shapes& outputs) { outputs[0] = of_channels(inputs[0]); }

void scale_shapes(const Attributes&, Shapes& inputs, Shapes& outputs) {
  expect_shape(inputs[1], of_channels(inputs[0]), "the factors");
  outputs[0] = inputs[0];
}

}  // namespace

const Operator channel_means{
    "_gluon_amp_channel_means",    takes<1>, data_types, mean_shapes, compute<average_block, 0>,
    compute<spread_block, 0, true>};
const Operator scale_channels{
    "_gluon_amp_scale_channels",    takes<2>, scale_types, scale_shapes, compute<multiply_block, 0>,
    compute<differentiate_block, 1>};

}  // namespace gluon_amp
