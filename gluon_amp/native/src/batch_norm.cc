// Batch normalization of feature maps with the channels last, a sum with another map, and limits on the results, as
// MXNet's BatchNorm, elemwise_add and clip compute them one after the other in training. Parameters and statistics are
// float32, and so is the arithmetic: maps in bfloat16 are rounded once. Moving averages are brought up to date forward.
// Backward computes the normalized values again: no map is kept for it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "operator.h"

namespace gluon_amp {

namespace {

constexpr int64_t kBlock = 32;  // channels whose sums fit into registers

struct Settings {
  explicit Settings(const Attributes& attributes)
      : eps(attributes.real("eps", 1e-3)),
        momentum(attributes.real("momentum", 0.9)),
        low(attributes.real("a_min", -std::numeric_limits<double>::infinity())),
        high(attributes.real("a_max", std::numeric_limits<double>::infinity())),
        rectifies(attributes.flag("rectifies", false)),
        is_gamma_one(attributes.flag("fix_gamma", true)),
        adds(attributes.flag("adds", false)) {}
  float eps, momentum, low, high;
  bool rectifies;  // as a rectifier has none, no gradient passes where a result is the lower limit itself
  bool is_gamma_one;
  bool adds;  // there is a map to add, as the last input
};

// Some rows of channels.
template <class T>
struct Rows {
  const T* data;
  int64_t count, width;
  const T* others;  // of the map to add
};

// The same of any type, and where they begin in memory.
struct Piece {
  template <class T>
  INLINED Rows<T> as() const {
    return {data.as<const T>() + begin, count, width, others ? others->as<const T>() + begin : nullptr};
  }
  const Tensor& data;
  const Tensor* others;
  int64_t begin, count, width;
};

// What the values of every channel are computed with, and the limits of all.
struct Channels {
  const float *mean, *scale, *beta;
  float low, high;
  bool rectifies;
};

INLINED float normalized(float value, const Channels& channels, int64_t i) {
  return (value - channels.mean[i]) * channels.scale[i] + channels.beta[i];
}

// What of an output's gradient reaches a value that another is added to.
INLINED float passed(float grad, float value, float other, const Channels& channels, int64_t i) {
  const float result = normalized(value, channels, i) + other;
  const bool is_cut = (result < channels.low) | (channels.rectifies & (result == channels.low));
  return is_cut | (result > channels.high) ? 0.f : grad;
}

// The means of rows, and the sums of squares around them. The second pass finds what rounding lost in the first.
template <class T>
INLINED void measure_block(const T* data, const Rows<T>& rows, float* means, float* squares, int64_t channels) {
  const float share = 1 / static_cast<float>(rows.count);
  float centers[kBlock] = {}, rests[kBlock] = {}, totals[kBlock] = {};
  for (int64_t row = 0; row < rows.count; ++row)
#pragma omp simd
    for (int64_t i = 0; i < channels; ++i) centers[i] += to_float(data[row * rows.width + i]);
#pragma omp simd
  for (int64_t i = 0; i < channels; ++i) centers[i] *= share;
  for (int64_t row = 0; row < rows.count; ++row)
#pragma omp simd
    for (int64_t i = 0; i < channels; ++i) {
      const float difference = to_float(data[row * rows.width + i]) - centers[i];
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
INLINED void measure_rows(const Rows<T>& rows, float* means, float* squares) {
  int64_t i = 0;
  for (; i + kBlock <= rows.width; i += kBlock) measure_block(rows.data + i, rows, means + i, squares + i, kBlock);
  if (i < rows.width) measure_block(rows.data + i, rows, means + i, squares + i, rows.width - i);
}

// A value of the map to add, which is 0 where there is none.
template <bool kAdds, class T>
INLINED float other_at(const Rows<T>& rows, int64_t position) {
  return kAdds ? to_float(rows.others[position]) : 0.f;
}

template <bool kAdds, class T>
INLINED void normalize_rows(const Rows<T>& rows, const Channels& channels, T* out) {
  for (int64_t first = 0; first < rows.count * rows.width; first += rows.width, out += rows.width)
#pragma omp simd
    for (int64_t i = 0; i < rows.width; ++i) {
      const float value = normalized(to_float(rows.data[first + i]), channels, i) + other_at<kAdds>(rows, first + i);
      const float risen = value < channels.low ? channels.low : value;
      store(value > channels.high ? channels.high : risen, &out[i]);
    }
}

// The sums of the gradients of normalized values, and of their products with the data around its mean.
template <bool kAdds, class T>
INLINED void add_up_block(const T* grad, int64_t first, const Rows<T>& rows, const Channels& channels, float* grads,
                          float* products, int64_t count) {
  float sums[kBlock] = {}, totals[kBlock] = {};
  for (int64_t row = 0; row < rows.count; ++row, first += rows.width)
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const float value = to_float(rows.data[first + i]);
      const float reached = passed(to_float(grad[first + i]), value, other_at<kAdds>(rows, first + i), channels, i);
      sums[i] += reached;
      totals[i] += reached * (value - channels.mean[i]);
    }
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    grads[i] = sums[i];
    products[i] = totals[i];
  }
}

template <bool kAdds, class T>
INLINED void add_up_rows(const T* grad, const Rows<T>& rows, Channels channels, float* grads, float* products) {
  int64_t i = 0;
  for (; i + kBlock <= rows.width; i += kBlock) {
    add_up_block<kAdds>(grad, i, rows, channels, grads + i, products + i, kBlock);
    channels.mean += kBlock, channels.scale += kBlock, channels.beta += kBlock;
  }
  if (i < rows.width) add_up_block<kAdds>(grad, i, rows, channels, grads + i, products + i, rows.width - i);
}

// `shift` and `slope` are the parts of the gradient that come through the mean and the deviation.
template <bool kAdds, class T>
INLINED void differentiate_rows(const T* grad, const Rows<T>& rows, const Channels& channels, const float* shift,
                                const float* slope, T* data_grad, T* other_grad) {
  for (int64_t first = 0; first < rows.count * rows.width; first += rows.width)
#pragma omp simd
    for (int64_t i = 0; i < rows.width; ++i) {
      const float value = to_float(rows.data[first + i]);
      const float reached = passed(to_float(grad[first + i]), value, other_at<kAdds>(rows, first + i), channels, i);
      store(reached * channels.scale[i] - shift[i] - (value - channels.mean[i]) * slope[i], &data_grad[first + i]);
      if (kAdds) store(reached, &other_grad[first + i]);
    }
}

VECTORIZED void measure(const Piece& piece, float* means, float* squares) {
  IN_TYPE(piece.data.type, measure_rows(piece.as<T>(), means, squares));
}
VECTORIZED void normalize(const Piece& piece, const Channels& channels, const Tensor& out) {
  IN_TYPE(out.type, T* begin = out.as<T>() + piece.begin; piece.others
                                                              ? normalize_rows<true>(piece.as<T>(), channels, begin)
                                                              : normalize_rows<false>(piece.as<T>(), channels, begin));
}
VECTORIZED void add_up(const Tensor& grad, const Piece& piece, const Channels& channels, float* grads,
                       float* products) {
  IN_TYPE(grad.type, const T* begin = grad.as<const T>() + piece.begin;
          piece.others ? add_up_rows<true>(begin, piece.as<T>(), channels, grads, products)
                       : add_up_rows<false>(begin, piece.as<T>(), channels, grads, products));
}
VECTORIZED void differentiate(const Tensor& grad, const Piece& piece, const Channels& channels, const float* shift,
                              const float* slope, const Tensor& data_grad, const Tensor* other_grad) {
  IN_TYPE(grad.type, const T* begin = grad.as<const T>() + piece.begin; T* to = data_grad.as<T>() + piece.begin;
          other_grad ? differentiate_rows<true>(begin, piece.as<T>(), channels, shift, slope, to,
                                                other_grad->as<T>() + piece.begin)
                     : differentiate_rows<false>(begin, piece.as<T>(), channels, shift, slope, to, to));
}

// All rows, in pieces that fit into a core's first cache, with two values a channel for each piece.
class Pieces {
 public:
  explicit Pieces(const Tensor& data, const Tensor* others)
      : width(data.dim(-1)),
        count(width ? data.size() / width : 0),
        data_(data),
        others_(others),
        at_once_(std::max<int64_t>(16, 8192 / std::max<int64_t>(width, 1))),
        parts_(new float[(count / at_once_ + 1) * 2 * width]) {}

  // Calls a function with a piece and its two values a channel.
  template <class Body>
  void each(const Body& body) const {
    parallel_ranges(count, at_once_, [&](int64_t begin, int64_t end) {
      body(Piece{data_, others_, begin * width, end - begin, width}, first(begin), first(begin) + width);
    });
  }

  // The mean and the variance of each channel, of those that the pieces have, always in the same order.
  void combine(float* means, float* variances) const {
    parallel_ranges(width, kBlock, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        double mean = 0, squares = 0;
        for (int64_t row = 0; row < count; row += at_once_) {
          const double seen = static_cast<double>(row), rows = static_cast<double>(std::min(at_once_, count - row));
          const double difference = first(row)[i] - mean;
          mean += difference * rows / (seen + rows);
          squares += first(row)[i + width] + difference * difference * seen * rows / (seen + rows);
        }
        means[i] = static_cast<float>(mean);  // what is not a number stays that, in the next line, too
        variances[i] = static_cast<float>(squares < 0 ? 0 : squares / static_cast<double>(count));
      }
    });
  }

  // The sums of both values of each channel, likewise.
  void add_up_parts(double* sums) const {
    for (int64_t row = 0; row < count; row += at_once_)
      for (int64_t i = 0; i < 2 * width; ++i) sums[i] += first(row)[i];
  }

  const int64_t width, count;

 private:
  float* first(int64_t begin) const { return &parts_[begin / at_once_ * 2 * width]; }

  const Tensor& data_;
  const Tensor* others_;
  const int64_t at_once_;
  const std::unique_ptr<float[]> parts_;
};

void scale_channels(const Settings& s, const Tensor& gamma, const float* inverse_deviation, float* scale) {
  for (int64_t i = 0; i < gamma.size(); ++i)
    scale[i] = (s.is_gamma_one ? 1.f : gamma.as<float>()[i]) * inverse_deviation[i];
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const Pieces pieces(inputs[0], s.adds ? &inputs[5] : nullptr);
  if (!pieces.count) return;
  float *mean = outputs[1].as<float>(), *inverse_deviation = outputs[2].as<float>();
  pieces.each([](const Piece& piece, float* means, float* squares) { measure(piece, means, squares); });
  const std::unique_ptr<float[]> variance(new float[2 * pieces.width]);
  pieces.combine(mean, variance.get());
  float *moving_mean = inputs[3].as<float>(), *moving_variance = inputs[4].as<float>();
  for (int64_t i = 0; i < pieces.width; ++i) {
    moving_mean[i] = moving_mean[i] * s.momentum + mean[i] * (1 - s.momentum);
    moving_variance[i] = moving_variance[i] * s.momentum + variance[i] * (1 - s.momentum);
    inverse_deviation[i] = 1 / std::sqrt(variance[i] + s.eps);
  }
  float* scale = &variance[pieces.width];
  scale_channels(s, inputs[1], inverse_deviation, scale);
  const Channels channels{mean, scale, inputs[2].as<float>(), s.low, s.high, s.rectifies};
  pieces.each([&](const Piece& piece, float*, float*) { normalize(piece, channels, outputs[0]); });
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const Tensor &out_grad = inputs[0], &gamma = inputs[4];  // inputs 1 and 2: the gradients of the statistics
  const Pieces pieces(inputs[3], s.adds ? &inputs[8] : nullptr);
  const size_t statistics = s.adds ? 10 : 9;
  for (int i = 1; i < 5; ++i) std::fill_n(outputs[i].as<float>(), pieces.width, 0.f);
  if (!pieces.count) return;
  const float *mean = inputs[statistics].as<float>(), *inverse_deviation = inputs[statistics + 1].as<float>();
  const std::unique_ptr<float[]> memory(new float[3 * pieces.width]);
  float *scale = memory.get(), *shift = scale + pieces.width, *slope = shift + pieces.width;
  scale_channels(s, gamma, inverse_deviation, scale);
  const Channels channels{mean, scale, inputs[5].as<float>(), s.low, s.high, s.rectifies};
  pieces.each(
      [&](const Piece& piece, float* grads, float* products) { add_up(out_grad, piece, channels, grads, products); });
  const std::unique_ptr<double[]> sums(new double[2 * pieces.width]());
  pieces.add_up_parts(sums.get());
  for (int64_t i = 0; i < pieces.width; ++i) {
    const double count = static_cast<double>(pieces.count), inverse = inverse_deviation[i];
    const double grad = sums[i], product = sums[i + pieces.width];
    if (!s.is_gamma_one) outputs[1].as<float>()[i] = static_cast<float>(product * inverse);
    outputs[2].as<float>()[i] = static_cast<float>(grad);
    shift[i] = static_cast<float>(scale[i] * grad / count);
    slope[i] = static_cast<float>(scale[i] * product * inverse * inverse / count);
  }
  pieces.each([&](const Piece& piece, float*, float*) {
    differentiate(out_grad, piece, channels, shift, slope, outputs[0], s.adds ? &outputs[5] : nullptr);
  });
}

constexpr const char* kNames[] = {"data", "gamma", "beta", "moving_mean", "moving_var", "the map to add"};

void types(const Attributes&, Types& inputs, Types& outputs) {
  outputs = {data_type(inputs[0], kNames[0]), kFloat32, kFloat32};
  inputs[0] = outputs[0];
  for (int i = 1; i < 5; ++i) expect_type(inputs[i], kFloat32, kNames[i]);
  if (inputs.size() > 5) expect_type(inputs[5], outputs[0], kNames[5]);
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  Settings{attributes};  // for errors at the call, not when it is run
  expect_known(inputs[0], "data");
  const Shape channels{inputs[0].back()};
  for (int i = 1; i < 5; ++i) expect_shape(inputs[i], channels, kNames[i]);
  if (inputs.size() > 5) expect_shape(inputs[5], inputs[0], kNames[5]);
  outputs = {inputs[0], channels, channels};
}

Arity arity(const Attributes& attributes) { return {Settings(attributes).adds ? 6 : 5, 3}; }

std::vector<int> mutated(const Attributes&) { return {3, 4}; }

}  // namespace

const Operator batch_norm{"_gluon_amp_batch_norm", arity, types, shapes, forward, backward, mutated};

}  // namespace gluon_amp
