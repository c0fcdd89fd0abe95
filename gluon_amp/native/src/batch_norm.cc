// Batch normalization of feature maps with the channels last, and limits on its results, as MXNet's BatchNorm and clip
// compute them one after the other in training. Statistics and parameters are float32. Moving averages are brought up to
// date forward. Backward computes the normalized values again: no map is kept for it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "families.h"
#include "operator.h"
#include "vector.h"

namespace gluon_amp {

namespace {

constexpr int64_t kBlock = 32;  // channels whose sums fit into registers

struct Settings {
  explicit Settings(const Attributes& attributes)
      : eps(static_cast<float>(attributes.number("eps", 1e-3))),
        momentum(static_cast<float>(attributes.number("momentum", 0.9))),
        low(static_cast<float>(attributes.number("a_min", -std::numeric_limits<double>::infinity()))),
        high(static_cast<float>(attributes.number("a_max", std::numeric_limits<double>::infinity()))),
        is_gamma_one(attributes.flag("fix_gamma", true)) {}
  float eps, momentum, low, high;
  bool is_gamma_one;
};

// What every channel is computed with.
struct Channels {
  const float *mean, *scale, *beta;
};

// Rows of channels, and how many of them are taken at once: they fit into a core's first cache.
struct Rows {
  explicit Rows(const Tensor& data)
      : width(data.dim(-1)),
        count(width ? data.size() / width : 0),
        at_once(std::max<int64_t>(16, 8192 / std::max<int64_t>(width, 1))),
        ranges((count + at_once - 1) / at_once) {}
  int64_t width, count, at_once, ranges;
};

INLINED float normalized(float value, const Channels& channels, int64_t i) {
  return (value - channels.mean[i]) * channels.scale[i] + channels.beta[i];
}

// The means of some rows, and the sums of squares around them. What the first sum lost in rounding the second pass finds.
template <class T>
INLINED void measure_block(const T* data, float* means, float* squares, int64_t rows, int64_t width, int64_t channels) {
  const float share = 1 / static_cast<float>(rows);
  float centers[kBlock] = {}, rests[kBlock] = {}, totals[kBlock] = {};
  for (int64_t row = 0; row < rows; ++row)
#pragma omp simd
    for (int64_t i = 0; i < channels; ++i) centers[i] += to_float(data[row * width + i]);
#pragma omp simd
  for (int64_t i = 0; i < channels; ++i) centers[i] *= share;
  for (int64_t row = 0; row < rows; ++row)
#pragma omp simd
    for (int64_t i = 0; i < channels; ++i) {
      const float difference = to_float(data[row * width + i]) - centers[i];
      rests[i] += difference;
      totals[i] += difference * difference;
    }
#pragma omp simd
  for (int64_t i = 0; i < channels; ++i) {
    means[i] = centers[i] + rests[i] * share;
    squares[i] = totals[i] - rests[i] * rests[i] * share;
  }
}

template <class T>
INLINED void measure_rows(const T* data, float* means, float* squares, int64_t rows, int64_t width) {
  int64_t i = 0;
  for (; i + kBlock <= width; i += kBlock) measure_block(data + i, means + i, squares + i, rows, width, kBlock);
  if (i < width) measure_block(data + i, means + i, squares + i, rows, width, width - i);
}

template <class T>
INLINED void normalize_rows(const T* data, Channels channels, T* out, int64_t rows, int64_t width, float low,
                            float high) {
  for (const T* end = data + rows * width; data != end; data += width, out += width)
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const float value = normalized(to_float(data[i]), channels, i);
      store(value > high ? high : value < low ? low : value, &out[i]);
    }
}

// The sums of the gradients of normalized values, and of their products with the data around its mean.
template <class T>
INLINED void add_up_block(const T* out_grad, const T* data, Channels channels, float* grads, float* products,
                          int64_t rows, int64_t width, int64_t count, float low, float high) {
  float sums[kBlock] = {}, totals[kBlock] = {};
  for (int64_t row = 0; row < rows; ++row)
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const float value = to_float(data[row * width + i]), result = normalized(value, channels, i);
      const float grad = (result > high) | (result < low) ? 0.f : to_float(out_grad[row * width + i]);
      sums[i] += grad;
      totals[i] += grad * (value - channels.mean[i]);
    }
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    grads[i] = sums[i];
    products[i] = totals[i];
  }
}

template <class T>
INLINED void add_up_rows(const T* out_grad, const T* data, Channels channels, float* grads, float* products,
                         int64_t rows, int64_t width, float low, float high) {
  for (int64_t i = 0; i < width; i += kBlock) {
    const Channels block{channels.mean + i, channels.scale + i, channels.beta + i};
    if (i + kBlock <= width)
      add_up_block(out_grad + i, data + i, block, grads + i, products + i, rows, width, kBlock, low, high);
    else
      add_up_block(out_grad + i, data + i, block, grads + i, products + i, rows, width, width - i, low, high);
  }
}

// `shift` and `slope` are the parts of the gradient that come from the mean and the deviation.
template <class T>
INLINED void backward_rows(const T* out_grad, const T* data, Channels channels, const float* shift, const float* slope,
                           T* data_grad, int64_t rows, int64_t width, float low, float high) {
  for (const T* end = data + rows * width; data != end; data += width, out_grad += width, data_grad += width)
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const float value = to_float(data[i]), result = normalized(value, channels, i);
      const float grad = (result > high) | (result < low) ? 0.f : to_float(out_grad[i]);
      store(grad * channels.scale[i] - shift[i] - (value - channels.mean[i]) * slope[i], &data_grad[i]);
    }
}

#define KERNELS(T)                                                                                                   \
  VECTORIZED void measure_kernel(const T* data, float* means, float* squares, int64_t rows, int64_t width) {         \
    measure_rows(data, means, squares, rows, width);                                                                 \
  }                                                                                                                  \
  VECTORIZED void normalize_kernel(const T* data, Channels channels, T* out, int64_t rows, int64_t width, float low, \
                                   float high) {                                                                     \
    normalize_rows(data, channels, out, rows, width, low, high);                                                     \
  }                                                                                                                  \
  VECTORIZED void add_up_kernel(const T* out_grad, const T* data, Channels channels, float* grads, float* products,  \
                                int64_t rows, int64_t width, float low, float high) {                                \
    add_up_rows(out_grad, data, channels, grads, products, rows, width, low, high);                                  \
  }                                                                                                                  \
  VECTORIZED void backward_kernel(const T* out_grad, const T* data, Channels channels, const float* shift,           \
                                  const float* slope, T* data_grad, int64_t rows, int64_t width, float low,          \
                                  float high) {                                                                      \
    backward_rows(out_grad, data, channels, shift, slope, data_grad, rows, width, low, high);                        \
  }
KERNELS(float)
KERNELS(bfloat16)
#undef KERNELS

// For each range of rows two values a channel.
class Parts {
 public:
  explicit Parts(const Rows& rows) : rows_(rows), values_(new float[rows.ranges * 2 * rows.width]) {}
  float* first(int64_t begin) const { return &values_[begin / rows_.at_once * 2 * rows_.width]; }
  float* second(int64_t begin) const { return first(begin) + rows_.width; }

 private:
  const Rows& rows_;
  std::unique_ptr<float[]> values_;
};

// The mean and the variance of each channel, from those of ranges, always in the same order.
void combine(const Rows& rows, const Parts& parts, float* means, float* variances) {
  parallel_ranges(rows.width, kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double mean = 0, squares = 0, seen = 0;
      for (int64_t row = 0; row < rows.count; row += rows.at_once) {
        const double count = static_cast<double>(std::min(rows.at_once, rows.count - row));
        const double difference = parts.first(row)[i] - mean;
        mean += difference * count / (seen + count);
        squares += parts.second(row)[i] + difference * difference * seen * count / (seen + count);
        seen += count;
      }
      means[i] = static_cast<float>(mean);
      variances[i] = static_cast<float>(squares < 0 ? 0 : squares / seen);  // what is not a number stays that
    }
  });
}

void add_up(const Rows& rows, const Parts& parts, double* grads, double* products) {
  for (int64_t row = 0; row < rows.count; row += rows.at_once)
    for (int64_t i = 0; i < rows.width; ++i) {
      grads[i] += parts.first(row)[i];
      products[i] += parts.second(row)[i];
    }
}

float gamma_of(const Settings& s, const Tensor& gamma, int64_t i) { return s.is_gamma_one ? 1.f : gamma.as<float>()[i]; }

template <class T>
void forward_as(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const Tensor &data = inputs[0], &gamma = inputs[1];
  const Rows rows(data);
  if (!rows.count) return;
  float *mean = outputs[1].as<float>(), *inverse_deviation = outputs[2].as<float>();
  const Parts parts(rows);
  parallel_ranges(rows.count, rows.at_once, [&](int64_t begin, int64_t end) {
    measure_kernel(data.as<const T>() + begin * rows.width, parts.first(begin), parts.second(begin), end - begin,
                   rows.width);
  });
  float* variance = inverse_deviation;
  combine(rows, parts, mean, variance);
  const std::unique_ptr<float[]> scale(new float[rows.width]);
  float *moving_mean = inputs[3].as<float>(), *moving_variance = inputs[4].as<float>();
  for (int64_t i = 0; i < rows.width; ++i) {
    moving_mean[i] = moving_mean[i] * s.momentum + mean[i] * (1 - s.momentum);
    moving_variance[i] = moving_variance[i] * s.momentum + variance[i] * (1 - s.momentum);
    inverse_deviation[i] = 1 / std::sqrt(variance[i] + s.eps);
    scale[i] = gamma_of(s, gamma, i) * inverse_deviation[i];
  }
  const Channels channels{mean, scale.get(), inputs[2].as<float>()};
  parallel_ranges(rows.count, rows.at_once, [&](int64_t begin, int64_t end) {
    normalize_kernel(data.as<const T>() + begin * rows.width, channels, outputs[0].as<T>() + begin * rows.width,
                     end - begin, rows.width, s.low, s.high);
  });
}

template <class T>
void backward_as(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const Tensor &out_grad = inputs[0], &data = inputs[3], &gamma = inputs[4];
  const float *mean = inputs[9].as<float>(), *inverse_deviation = inputs[10].as<float>();
  float *gamma_grad = outputs[1].as<float>(), *beta_grad = outputs[2].as<float>();
  const Rows rows(data);
  for (int i = 1; i < 5; ++i) std::fill_n(outputs[i].as<float>(), rows.width, 0.f);
  if (!rows.count) return;
  const std::unique_ptr<float[]> memory(new float[3 * rows.width]);
  float *scale = memory.get(), *shift = scale + rows.width, *slope = shift + rows.width;
  for (int64_t i = 0; i < rows.width; ++i) scale[i] = gamma_of(s, gamma, i) * inverse_deviation[i];
  const Channels channels{mean, scale, inputs[5].as<float>()};
  const Parts parts(rows);
  parallel_ranges(rows.count, rows.at_once, [&](int64_t begin, int64_t end) {
    add_up_kernel(out_grad.as<const T>() + begin * rows.width, data.as<const T>() + begin * rows.width, channels,
                  parts.first(begin), parts.second(begin), end - begin, rows.width, s.low, s.high);
  });
  const std::unique_ptr<double[]> sums(new double[2 * rows.width]());
  double *grads = sums.get(), *products = grads + rows.width;
  add_up(rows, parts, grads, products);
  for (int64_t i = 0; i < rows.width; ++i) {
    const double count = static_cast<double>(rows.count), inverse = inverse_deviation[i];
    if (!s.is_gamma_one) gamma_grad[i] = static_cast<float>(products[i] * inverse);
    beta_grad[i] = static_cast<float>(grads[i]);
    shift[i] = static_cast<float>(scale[i] * grads[i] / count);
    slope[i] = static_cast<float>(scale[i] * products[i] * inverse * inverse / count);
  }
  parallel_ranges(rows.count, rows.at_once, [&](int64_t begin, int64_t end) {
    backward_kernel(out_grad.as<const T>() + begin * rows.width, data.as<const T>() + begin * rows.width, channels,
                    shift, slope, outputs[0].as<T>() + begin * rows.width, end - begin, rows.width, s.low, s.high);
  });
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  (inputs[0].type == kBfloat16 ? forward_as<bfloat16> : forward_as<float>)(attributes, inputs, outputs);
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  (inputs[3].type == kBfloat16 ? backward_as<bfloat16> : backward_as<float>)(attributes, inputs, outputs);
}

void types(const Attributes&, Types& inputs, Types& outputs) {
  static const char* names[] = {"data", "gamma", "beta", "moving_mean", "moving_var"};
  outputs[0] = inputs[0] = data_type(inputs[0], "data");
  for (int i = 1; i < 5; ++i) expect_type(inputs[i], kFloat32, names[i]);
  outputs[1] = outputs[2] = kFloat32;
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  static const char* names[] = {"data", "gamma", "beta", "moving_mean", "moving_var"};
  Settings{attributes};  // for errors at the call, not when it is run
  expect_known(inputs[0], "data");
  const Shape channels{inputs[0].back()};
  for (int i = 1; i < 5; ++i) expect_shape(inputs[i], channels, names[i]);
  outputs[0] = inputs[0];
  outputs[1] = outputs[2] = channels;
}

Arity arity(const Attributes&) { return {5, 3}; }

std::vector<int> mutated(const Attributes&) { return {3, 4}; }

}  // namespace

const Operator batch_norm{"_gluon_amp_batch_norm", arity, types, shapes, forward, backward, mutated};

}  // namespace gluon_amp
