// Pooling in float32, as MXNet's: means of whole channels (global_pool=True) of maps with any number of axes, and means
// or maxima of windows of images (pooling_convention='valid'). The rows of windows become one row, and its columns
// values.
#include <algorithm>
#include <limits>

#include "operator.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 32768;
constexpr float kLowest = std::numeric_limits<float>::lowest();  // where oneDNN's maxima begin

struct Settings {
  explicit Settings(const Attributes& attributes)
      : is_global(attributes.flag("global_pool", false)), counts_padding(attributes.flag("count_include_pad", true)) {
    const std::string type = attributes.text("pool_type", "max");
    takes_most = type == "max";
    if (type != "avg" && (!takes_most || is_global))
      fail("expected pool_type='avg', or 'max' of windows, received '", type, "'");
    if (is_global) return;
    const std::string convention = attributes.text("pooling_convention", "valid");
    if (convention != "valid") fail("expected pooling_convention='valid', received '", convention, "'");
    kernel = attributes.pair("kernel", {1, 1});
    stride = attributes.pair("stride", {1, 1});
    pad = attributes.pair("pad", {0, 0});
    for (int axis = 0; axis < 2; ++axis)
      if (kernel[axis] < 1 || stride[axis] < 1 || pad[axis] < 0 || pad[axis] >= kernel[axis])
        fail("expected a kernel and strides from 1 on, and padding from 0 on, less than the kernel; received kernel=",
             attributes.text("kernel", "(1, 1)"), ", stride=", attributes.text("stride", "(1, 1)"),
             ", pad=", attributes.text("pad", "(0, 0)"));
  }

  bool is_global, takes_most, counts_padding;
  std::vector<int64_t> kernel, stride, pad;  // of windows
};

// Windows of one channel along an axis.
struct Axis {
  int64_t size, windows, kernel, stride, pad;

  // What of a window lies on the data.
  INLINED int64_t begin(int64_t window) const { return std::max<int64_t>(window * stride - pad, 0); }
  INLINED int64_t end(int64_t window) const { return std::min(window * stride - pad + kernel, size); }
  // The windows whose value at an offset lies on the data, from the first to the one before the last.
  INLINED int64_t first(int64_t offset) const {
    return std::min(windows, std::max<int64_t>(pad - offset + stride - 1, 0) / stride);
  }
  INLINED int64_t last(int64_t offset) const { return std::min(windows, (size - 1 + pad - offset + stride) / stride); }
};

struct Windows {
  Axis rows, columns;
  bool counts_padding;

  INLINED int64_t count(int64_t row, int64_t column) const {
    return counts_padding ? rows.kernel * columns.kernel
                          : (rows.end(row) - rows.begin(row)) * (columns.end(column) - columns.begin(column));
  }
  int64_t padded_width() const { return columns.size + 2 * columns.pad; }
};

template <bool kMost>
INLINED void take(const float* values, float* results, int64_t count, int64_t stride) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = values[i * stride];
    results[i] = kMost ? (value > results[i] ? value : results[i]) : results[i] + value;
  }
}

INLINED void spread(const float* values, float* row, int64_t count, int64_t stride) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) row[i * stride] += values[i];
}

// A maximum's gradient goes to the first value that equals it; those left have found none yet.
INLINED void give(const float* values, const float* most, float* left, float* grads, int64_t count, int64_t stride) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const bool is_most = values[i * stride] == most[i];
    grads[i * stride] += is_most ? left[i] : 0.f;
    left[i] = is_most ? 0.f : left[i];
  }
}

// In a window of NaN and -inf no value is above kLowest: its gradient goes to the window's first place, as in oneDNN,
// and nowhere where that is padding.
INLINED void give_to_first(const Windows& w, int64_t y, const float* most, float* left, float* grads) {
  const int64_t row = y * w.rows.stride - w.rows.pad, first = w.columns.first(0), last = w.columns.last(0);
  for (int64_t x = 0; x < w.columns.windows; ++x) {
    if (most[x] > kLowest) continue;
    if (row >= 0 && first <= x && x < last)
      grads[row * w.columns.size + x * w.columns.stride - w.columns.pad] += left[x];
    left[x] = 0;
  }
}

// The compiler makes other instructions where it knows the stride.
#define FOR_STRIDE(LOOP, COUNT, STRIDE, ...) \
  do {                                       \
    if ((STRIDE) == 1)                       \
      LOOP(__VA_ARGS__, COUNT, 1);           \
    else if ((STRIDE) == 2)                  \
      LOOP(__VA_ARGS__, COUNT, 2);           \
    else                                     \
      LOOP(__VA_ARGS__, COUNT, STRIDE);      \
  } while (false)

template <bool kMost>
INLINED void forward_loop(const Windows& w, const float* data, float* out, float* row) {
  const Axis& columns = w.columns;
  for (int64_t y = 0; y < w.rows.windows; ++y, out += columns.windows) {
    std::fill_n(row, w.padded_width(), kMost ? kLowest : 0.f);
    for (int64_t from = w.rows.begin(y); from < w.rows.end(y); ++from)
      take<kMost>(data + from * columns.size, row + columns.pad, columns.size, 1);
    std::fill_n(out, columns.windows, kMost ? kLowest : 0.f);
    for (int64_t x = 0; x < columns.kernel; ++x) FOR_STRIDE(take<kMost>, columns.windows, columns.stride, row + x, out);
    if (!kMost)
      for (int64_t x = 0; x < columns.windows; ++x) out[x] /= static_cast<float>(w.count(y, x));
  }
}

INLINED void backward_means_loop(const Windows& w, const float* out_grads, float* grads, float* row) {
  const Axis& columns = w.columns;
  float* shares = row + w.padded_width();
  for (int64_t y = 0; y < w.rows.windows; ++y, out_grads += columns.windows) {
    for (int64_t x = 0; x < columns.windows; ++x) shares[x] = out_grads[x] / static_cast<float>(w.count(y, x));
    std::fill_n(row, w.padded_width(), 0.f);
    for (int64_t x = 0; x < columns.kernel; ++x) FOR_STRIDE(spread, columns.windows, columns.stride, shares, row + x);
    for (int64_t to = w.rows.begin(y); to < w.rows.end(y); ++to)
      take<false>(row + columns.pad, grads + to * columns.size, columns.size, 1);
  }
}

INLINED void backward_maxima_loop(const Windows& w, const float* out_grads, const float* data, const float* out,
                                  float* grads, float* left) {
  const Axis& columns = w.columns;
  for (int64_t y = 0; y < w.rows.windows; ++y, out += columns.windows, out_grads += columns.windows) {
    std::copy_n(out_grads, columns.windows, left);
    give_to_first(w, y, out, left, grads);
    for (int64_t from = w.rows.begin(y); from < w.rows.end(y); ++from)
      for (int64_t x = 0; x < columns.kernel; ++x) {
        const int64_t first = columns.first(x), count = columns.last(x) - first;
        const int64_t place = from * columns.size + first * columns.stride - columns.pad + x;
        FOR_STRIDE(give, count, columns.stride, data + place, out + first, left + first, grads + place);
      }
  }
}

VECTORIZED void forward_means(const Windows& w, const float* data, float* out, float* row) {
  forward_loop<false>(w, data, out, row);
}
VECTORIZED void forward_maxima(const Windows& w, const float* data, float* out, float* row) {
  forward_loop<true>(w, data, out, row);
}
VECTORIZED void backward_means(const Windows& w, const float* out_grads, float* grads, float* row) {
  backward_means_loop(w, out_grads, grads, row);
}
VECTORIZED void backward_maxima(const Windows& w, const float* out_grads, const float* data, const float* out,
                                float* grads, float* left) {
  backward_maxima_loop(w, out_grads, data, out, grads, left);
}

VECTORIZED float mean_of(const float* data, int64_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += data[i];
  return sum / static_cast<float>(count);
}

// Run a function for ranges of channels of all images, on all threads: where a channel begins, its
// number of values, and where its results begin.
template <class Run>
void for_channels(const Tensor& data, const Tensor& out, const Run& run) {
  const int64_t channels = data.dim(0) * data.dim(1);
  if (!channels) return;
  const int64_t values = data.size() / channels, results = out.size() / channels;
  for_pieces(channels, values, kRange, [&](int64_t channel) { run(channel * values, values, channel * results); });
}

Windows windows_of(const Settings& s, const Tensor& data, const Tensor& out) {
  const auto axis = [&](int number) {
    return Axis{data.dim(number + 2), out.dim(number + 2), s.kernel[number], s.stride[number], s.pad[number]};
  };
  return {axis(0), axis(1), s.counts_padding};
}

float* row_of(const Windows& w) {
  return static_cast<float*>(scratch<Windows>((w.padded_width() + w.columns.windows) * sizeof(float)));
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const float* data = inputs[0].as<float>();
  float* out = outputs[0].as<float>();
  if (s.is_global)
    return for_channels(inputs[0], outputs[0],
                        [&](int64_t from, int64_t size, int64_t to) { out[to] = mean_of(data + from, size); });
  const Windows w = windows_of(s, inputs[0], outputs[0]);
  for_channels(inputs[0], outputs[0], [&](int64_t from, int64_t, int64_t to) {
    (s.takes_most ? forward_maxima : forward_means)(w, data + from, out + to, row_of(w));
  });
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const float *out_grads = inputs[0].as<float>(), *data = inputs[1].as<float>(), *out = inputs[2].as<float>();
  float* grads = outputs[0].as<float>();
  if (s.is_global)
    return for_channels(inputs[1], inputs[2], [&](int64_t to, int64_t size, int64_t from) {
      std::fill_n(grads + to, size, out_grads[from] / static_cast<float>(size));
    });
  const Windows w = windows_of(s, inputs[1], inputs[2]);
  for_channels(inputs[1], inputs[2], [&](int64_t to, int64_t size, int64_t from) {
    std::fill_n(grads + to, size, 0.f);
    if (s.takes_most)
      backward_maxima(w, out_grads + from, data + to, out + from, grads + to, row_of(w));
    else
      backward_means(w, out_grads + from, grads + to, row_of(w));
  });
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  const Settings s(attributes);
  const Shape& data = inputs[0];
  expect_known(data, "data");
  if (s.is_global ? data.size() < 3 : data.size() != 4)
    fail("expected images, channels and ", s.is_global ? "one axis or more" : "two axes", ", received data of shape ",
         describe(data));
  outputs[0] = Shape(data.size(), 1);
  std::copy_n(data.begin(), 2, outputs[0].begin());
  if (s.is_global) return;
  for (int axis = 0; axis < 2; ++axis) {
    const int64_t room = data[axis + 2] + 2 * s.pad[axis] - s.kernel[axis];
    if (room < 0) fail("expected windows no larger than padded maps, received data of shape ", describe(data));
    outputs[0][axis + 2] = static_cast<uint32_t>(room / s.stride[axis] + 1);
  }
}

}  // namespace

const Operator pooling{"_gluon_amp_pooling", takes<1>, float32_types, shapes, forward, backward};

}  // namespace gluon_amp
