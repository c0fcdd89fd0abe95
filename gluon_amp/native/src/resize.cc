// Bilinear resizing of maps, as MXNet's _contrib_BilinearResize2D computes it with mode='size'. Both axes are blended
// one after the other, the columns of the given map first: there are fewer of its rows where maps grow.
#include <algorithm>

#include "operator.h"

namespace gluon_amp {

namespace {

struct Settings {
  explicit Settings(const Attributes& attributes)
      : height(attributes.count("height")),
        width(attributes.count("width")),
        aligns_corners(attributes.flag("align_corners", true)) {
    const std::string mode = attributes.text("mode", "size");
    if (mode != "size") fail("expected mode='size', received mode='", mode, "'");
  }
  int64_t height, width;
  bool aligns_corners;
};

// Where the values of an axis come from: a share of one value, and the rest of the next one.
struct Sources {
  Sources(int64_t given, int64_t made, bool aligns_corners) : first(made), next(made), share(made) {
    const float end = static_cast<float>(given - 1), size = static_cast<float>(made);
    const float ratio = made == 1 ? 0 : aligns_corners ? end / (size - 1) : static_cast<float>(given) / size;
    for (int64_t i = 0; i < made; ++i) {
      const float place = static_cast<float>(i);
      const float source = std::min(std::max(aligns_corners ? ratio * place : ratio * (place + 0.5f) - 0.5f, 0.f), end);
      first[i] = static_cast<int32_t>(source);
      next[i] = std::min<int32_t>(first[i] + 1, static_cast<int32_t>(given - 1));
      share[i] = source - static_cast<float>(first[i]);
    }
  }
  std::vector<int32_t> first, next;
  std::vector<float> share;  // of the next value
};

VECTORIZED void blend_columns(const float* row, const Sources& from, float* out, int64_t count) {
  const int32_t *first = from.first.data(), *next = from.next.data();
  const float* share = from.share.data();
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = (1 - share[i]) * row[first[i]] + share[i] * row[next[i]];
}

VECTORIZED void load(const bfloat16* row, float* values, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = to_float(row[i]);
}

template <class T>
INLINED void blend_rows_loop(const float* first, const float* next, float share, T* out, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) store((1 - share) * first[i] + share * next[i], &out[i]);
}

template <class T>
INLINED void add_row_loop(const T* grad, float share, float* sums, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) sums[i] += share * to_float(grad[i]);
}

template <class T>
INLINED void store_row_loop(const float* sums, T* out, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) store(sums[i], &out[i]);
}

VECTORIZED void blend_rows(const float* first, const float* next, float share, const Tensor& out, int64_t begin,
                           int64_t count) {
  IN_TYPE(out.type, blend_rows_loop(first, next, share, out.as<T>() + begin, count));
}
VECTORIZED void add_row(const Tensor& grad, int64_t begin, float share, float* sums, int64_t count) {
  IN_TYPE(grad.type, add_row_loop(grad.as<const T>() + begin, share, sums, count));
}
VECTORIZED void store_row(const float* sums, const Tensor& out, int64_t begin, int64_t count) {
  IN_TYPE(out.type, store_row_loop(sums, out.as<T>() + begin, count));
}

struct Rows {};
struct Sums {};

// Run a function for every map, on all threads, with where it begins and where a resized one does.
template <class Run>
void for_maps(const Tensor& given, const Tensor& made, const Run& run) {
  const int64_t maps = given.dim(0) * given.dim(1);
  if (!given.size() || !made.size()) return;
  for_pieces(maps, 1, 1, [&](int64_t map) { run(map * (given.size() / maps), map * (made.size() / maps)); });
}

// Copy maps that keep their size, as MXNet does: 0 times an infinity beside a value would make it NaN.
bool copied(const Tensor& from, const Tensor& to) {
  if (from.dim(2) != to.dim(2) || from.dim(3) != to.dim(3)) return false;
  copy(from, 0, to, 0, from.size());
  return true;
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const Tensor &data = inputs[0], &out = outputs[0];
  if (copied(data, out)) return;
  const int64_t height = data.dim(2), width = data.dim(3);
  const Sources down(height, s.height, s.aligns_corners), across(width, s.width, s.aligns_corners);
  for_maps(data, out, [&](int64_t from, int64_t to) {
    const auto rows = static_cast<float*>(scratch<Rows>(height * s.width * sizeof(float)));
    const auto loaded = static_cast<float*>(scratch<Sums>(width * sizeof(float)));
    for (int64_t i = 0; i < height; ++i) {
      const int64_t begin = from + i * width;
      if (data.type == kBfloat16) load(data.as<bfloat16>() + begin, loaded, width);
      blend_columns(data.type == kBfloat16 ? loaded : data.as<float>() + begin, across, rows + i * s.width, s.width);
    }
    for (int64_t i = 0; i < s.height; ++i)
      blend_rows(rows + down.first[i] * s.width, rows + down.next[i] * s.width, down.share[i], out, to + i * s.width,
                 s.width);
  });
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const Tensor &out_grad = inputs[0], &data_grad = outputs[0];
  if (copied(out_grad, data_grad)) return;
  const int64_t height = data_grad.dim(2), width = data_grad.dim(3);
  const Sources down(height, s.height, s.aligns_corners), across(width, s.width, s.aligns_corners);
  for_maps(data_grad, out_grad, [&](int64_t to, int64_t from) {
    const auto rows = static_cast<float*>(scratch<Rows>(height * s.width * sizeof(float)));
    const auto sums = static_cast<float*>(scratch<Sums>(width * sizeof(float)));
    std::fill_n(rows, height * s.width, 0.f);
    for (int64_t i = 0; i < s.height; ++i) {
      const int64_t grad = from + i * s.width;
      add_row(out_grad, grad, 1 - down.share[i], rows + down.first[i] * s.width, s.width);
      add_row(out_grad, grad, down.share[i], rows + down.next[i] * s.width, s.width);
    }
    for (int64_t i = 0; i < height; ++i) {
      const float* row = rows + i * s.width;
      std::fill_n(sums, width, 0.f);
      for (int64_t j = 0; j < s.width; ++j) {
        sums[across.first[j]] += (1 - across.share[j]) * row[j];
        sums[across.next[j]] += across.share[j] * row[j];
      }
      store_row(sums, data_grad, to + i * width, width);
    }
  });
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  const Settings s(attributes);
  const Shape& data = inputs[0];
  expect_known(data, "data");
  if (data.size() != 4) fail("expected images, received data of shape ", describe(data));
  outputs[0] = {data[0], data[1], static_cast<uint32_t>(s.height), static_cast<uint32_t>(s.width)};
}

}  // namespace

const Operator resize{"_gluon_amp_resize", takes<1>, data_types, shapes, forward, backward};

}  // namespace gluon_amp
