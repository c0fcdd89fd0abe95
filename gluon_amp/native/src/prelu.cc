// Values above zero as they are, others times a slope, as MXNet's LeakyReLU computes it with act_type='prelu'. There is
// one slope, or one for each channel, the second axis; slopes and their gradients are float32.
#include <algorithm>

#include "families.h"
#include "operator.h"
#include "vector.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 16384;
constexpr int64_t kNarrow = 16;  // values of a channel below which they do not fill a vector
constexpr int64_t kParts = 32;   // into which rows are cut, each with sums of its own

template <class T>
INLINED void forward_loop(const T* data, float slope, T* out, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(data[i]);
    store(value > 0 ? value : value * slope, &out[i]);
  }
}

template <class T>
INLINED void forward_each_loop(const T* data, const float* slopes, T* out, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(data[i]);
    store(value > 0 ? value : value * slopes[i], &out[i]);
  }
}

// Return the gradient of the slope. As in MXNet one that is not finite reaches it whatever the value is.
template <class T>
INLINED float backward_loop(const T* out_grad, const T* data, float slope, T* data_grad, int64_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(data[i]), grad = to_float(out_grad[i]);
    sum += grad * (value > 0 ? 0.0f : value);
    store(value > 0 ? grad : grad * slope, &data_grad[i]);
  }
  return sum;
}

template <class T>
INLINED void backward_each_loop(const T* out_grad, const T* data, const float* slopes, T* data_grad, float* sums,
                                int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(data[i]), grad = to_float(out_grad[i]);
    sums[i] += grad * (value > 0 ? 0.0f : value);
    store(value > 0 ? grad : grad * slopes[i], &data_grad[i]);
  }
}

#define KERNELS(T)                                                                                               \
  VECTORIZED void forward_kernel(const T* data, float slope, T* out, int64_t count) {                            \
    forward_loop(data, slope, out, count);                                                                       \
  }                                                                                                              \
  VECTORIZED void forward_each_kernel(const T* data, const float* slopes, T* out, int64_t count) {               \
    forward_each_loop(data, slopes, out, count);                                                                 \
  }                                                                                                              \
  VECTORIZED float backward_kernel(const T* out_grad, const T* data, float slope, T* data_grad, int64_t count) { \
    return backward_loop(out_grad, data, slope, data_grad, count);                                               \
  }                                                                                                              \
  VECTORIZED void backward_each_kernel(const T* out_grad, const T* data, const float* slopes, T* data_grad,      \
                                       float* sums, int64_t count) {                                             \
    backward_each_loop(out_grad, data, slopes, data_grad, sums, count);                                          \
  }
KERNELS(float)
KERNELS(bfloat16)
#undef KERNELS

// The data as rows of channels, of some values each.
struct Layout {
  Layout(const Tensor& data, const Tensor& slopes) : channels(slopes.size()) {
    if (channels == 1) {  // pieces of all the data, the last of which may be shorter
      rows = (data.size() + kRange - 1) / kRange;
      width = kRange;
    } else {
      rows = data.dim(0);
      width = rows ? data.size() / (rows * channels) : 0;
    }
    size = data.size();
  }
  bool is_narrow() const { return channels > 1 && width < kNarrow; }
  int64_t count(int64_t piece) const { return std::min(width, size - piece * width); }

  int64_t rows, channels, width, size;
};

struct Expanded {};
struct Sums {};

// The slope of each value of a row.
float* expanded(const Layout& layout, const float* slopes) {
  float* made = static_cast<float*>(scratch<Expanded>(layout.channels * layout.width * sizeof(float)));
  for (int64_t channel = 0; channel < layout.channels; ++channel)
    std::fill_n(made + channel * layout.width, layout.width, slopes[channel]);
  return made;
}

// Run a function for ranges of pieces, which have one slope each.
template <class Run>
void for_pieces(const Layout& layout, const Run& run) {
  parallel_ranges(layout.rows * layout.channels, std::max<int64_t>(1, kRange / std::max<int64_t>(1, layout.width)),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t piece = begin; piece < end; ++piece) run(piece, piece % layout.channels);
                  });
}

// Run a function for each part of the rows, all of which are as long but the last.
template <class Run>
void for_parts(const Layout& layout, const Run& run) {
  const int64_t rows = std::max<int64_t>(1, (layout.rows + kParts - 1) / kParts);
  parallel_ranges(layout.rows, rows, [&](int64_t begin, int64_t end) { run(begin / rows, begin, end); });
}

template <class T>
void forward_as(const Tensors& inputs, const Tensors& outputs) {
  const Layout layout(inputs[0], inputs[1]);
  const T* data = inputs[0].as<const T>();
  const float* slopes = inputs[1].as<const float>();
  T* out = outputs[0].as<T>();
  const int64_t row = layout.channels * layout.width;
  if (layout.is_narrow()) {
    const float* each = expanded(layout, slopes);
    for_parts(layout, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t i = begin * row; i < end * row; i += row) forward_each_kernel(data + i, each, out + i, row);
    });
  } else {
    for_pieces(layout, [&](int64_t piece, int64_t channel) {
      const int64_t i = piece * layout.width;
      forward_kernel(data + i, slopes[channel], out + i, layout.count(piece));
    });
  }
}

// Add up the sums of every so many: those of a channel, in groups of its values.
void add_up(const float* sums, int64_t groups, const Layout& layout, int64_t values, float* totals) {
  for (int64_t channel = 0; channel < layout.channels; ++channel) {
    double total = 0;
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t i = 0; i < values; ++i) total += sums[(group * layout.channels + channel) * values + i];
    totals[channel] = static_cast<float>(total);
  }
}

template <class T>
void backward_as(const Tensors& inputs, const Tensors& outputs) {
  const Layout layout(inputs[1], inputs[2]);
  const T *out_grad = inputs[0].as<const T>(), *data = inputs[1].as<const T>();
  const float* slopes = inputs[2].as<const float>();
  T* data_grad = outputs[0].as<T>();
  float* slope_grad = outputs[1].as<float>();
  const int64_t row = layout.channels * layout.width;
  if (layout.is_narrow()) {
    const float* each = expanded(layout, slopes);
    float* sums = static_cast<float*>(scratch<Sums>(kParts * row * sizeof(float)));
    std::fill_n(sums, kParts * row, 0.0f);
    for_parts(layout, [&](int64_t part, int64_t begin, int64_t end) {
      for (int64_t i = begin * row; i < end * row; i += row)
        backward_each_kernel(out_grad + i, data + i, each, data_grad + i, sums + part * row, row);
    });
    add_up(sums, kParts, layout, layout.width, slope_grad);
  } else {
    float* sums = static_cast<float*>(scratch<Sums>(layout.rows * layout.channels * sizeof(float)));
    for_pieces(layout, [&](int64_t piece, int64_t channel) {
      const int64_t i = piece * layout.width;
      sums[piece] = backward_kernel(out_grad + i, data + i, slopes[channel], data_grad + i, layout.count(piece));
    });
    add_up(sums, layout.rows, layout, 1, slope_grad);
  }
}

void forward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  (inputs[0].type == kBfloat16 ? forward_as<bfloat16> : forward_as<float>)(inputs, outputs);
}

void backward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  (inputs[1].type == kBfloat16 ? backward_as<bfloat16> : backward_as<float>)(inputs, outputs);
}

void types(const Attributes&, Types& inputs, Types& outputs) {
  outputs[0] = inputs[0] = data_type(inputs[0], "data");
  expect_type(inputs[1], kFloat32, "the slopes");
}

void shapes(const Attributes&, Shapes& inputs, Shapes& outputs) {
  const Shape &data = inputs[0], &slopes = inputs[1];
  expect_known(data, "data");
  expect_known(slopes, "the slopes");
  const bool fits = slopes.size() == 1 && (slopes[0] == 1 || (data.size() > 1 && slopes[0] == data[1]));
  if (!fits)
    fail("expected one slope, or one for each channel, received data of shape ", describe(data),
         " and slopes of shape ", describe(slopes));
  outputs[0] = data;
}

Arity arity(const Attributes&) { return {2, 1}; }

}  // namespace

const Operator prelu{"_gluon_amp_prelu", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
