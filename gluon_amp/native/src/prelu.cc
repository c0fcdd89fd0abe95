// Values above zero as they are, others times a slope, as MXNet's LeakyReLU computes it with act_type='prelu'. There is
// one slope, or one for each channel, the second axis; slopes and their gradients are float32.
#include <algorithm>

#include "operator.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 16384;
constexpr int64_t kNarrow = 16;  // values of a channel below which they do not fill a vector
constexpr int64_t kParts = 32;   // into which rows are cut, each with sums of its own

// One slope for all values.
struct One {
  float slope;
  INLINED float operator[](int64_t) const { return slope; }
};

template <class T, class Slopes>
INLINED void forward_loop(const T* data, Slopes slopes, T* out, int64_t count) {
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

VECTORIZED void forward_range(const Tensor& data, const Tensor& out, int64_t begin, float slope, int64_t count) {
  IN_TYPE(data.type, forward_loop(data.as<const T>() + begin, One{slope}, out.as<T>() + begin, count));
}
VECTORIZED void forward_rows(const Tensor& data, const Tensor& out, int64_t begin, int64_t end, const float* slopes,
                             int64_t row) {
  IN_TYPE(data.type, for (int64_t i = begin * row; i < end * row; i += row)
                         forward_loop(data.as<const T>() + i, slopes, out.as<T>() + i, row));
}
VECTORIZED float backward_range(const Tensors& in, const Tensor& data_grad, int64_t begin, float slope, int64_t count) {
  float sum;
  IN_TYPE(in[0].type, sum = backward_loop(in[0].as<const T>() + begin, in[1].as<const T>() + begin, slope,
                                          data_grad.as<T>() + begin, count));
  return sum;
}
VECTORIZED void backward_rows(const Tensors& in, const Tensor& data_grad, int64_t begin, int64_t end,
                              const float* slopes, float* sums, int64_t row) {
  IN_TYPE(in[0].type, for (int64_t i = begin * row; i < end * row; i += row) backward_each_loop(
                          in[0].as<const T>() + i, in[1].as<const T>() + i, slopes, data_grad.as<T>() + i, sums, row));
}

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
  int64_t row() const { return channels * width; }
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

// Run a function for each part of the rows, all of which are as long but the last.
template <class Run>
void for_parts(const Layout& layout, const Run& run) {
  const int64_t rows = std::max<int64_t>(1, (layout.rows + kParts - 1) / kParts);
  parallel_ranges(layout.rows, rows, [&](int64_t begin, int64_t end) { run(begin / rows, begin, end); });
}

void forward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  const Layout layout(inputs[0], inputs[1]);
  const float* slopes = inputs[1].as<const float>();
  const int64_t row = layout.row();
  if (layout.is_narrow()) {
    const float* each = expanded(layout, slopes);
    for_parts(layout,
              [&](int64_t, int64_t begin, int64_t end) { forward_rows(inputs[0], outputs[0], begin, end, each, row); });
  } else {
    for_pieces(layout.rows * layout.channels, layout.width, kRange, [&](int64_t piece) {
      forward_range(inputs[0], outputs[0], piece * layout.width, slopes[piece % layout.channels], layout.count(piece));
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

void backward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  const Layout layout(inputs[1], inputs[2]);
  const float* slopes = inputs[2].as<const float>();
  float* slope_grad = outputs[1].as<float>();
  const int64_t row = layout.row(), pieces = layout.rows * layout.channels;
  if (layout.is_narrow()) {
    const float* each = expanded(layout, slopes);
    float* sums = static_cast<float*>(scratch<Sums>(kParts * row * sizeof(float)));
    std::fill_n(sums, kParts * row, 0.0f);
    for_parts(layout, [&](int64_t part, int64_t begin, int64_t end) {
      backward_rows(inputs, outputs[0], begin, end, each, sums + part * row, row);
    });
    add_up(sums, kParts, layout, layout.width, slope_grad);
  } else {
    float* sums = static_cast<float*>(scratch<Sums>(pieces * sizeof(float)));
    for_pieces(pieces, layout.width, kRange, [&](int64_t piece) {
      sums[piece] = backward_range(inputs, outputs[0], piece * layout.width, slopes[piece % layout.channels],
                                   layout.count(piece));
    });
    add_up(sums, layout.rows, layout, 1, slope_grad);
  }
}

void types(const Attributes& attributes, Types& inputs, Types& outputs) {
  data_types(attributes, inputs, outputs);
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

}  // namespace

const Operator prelu{"_gluon_amp_prelu", takes<2>, types, shapes, forward, backward};

}  // namespace gluon_amp
