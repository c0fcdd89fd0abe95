// Bilinear resizing of maps, as MXNet's _contrib_BilinearResize2D computes it with mode='size'. Both axes are blended
// one after the other, the columns of the given map first: there are fewer of its rows where maps grow.
#include <algorithm>

#include "families.h"
#include "operator.h"
#include "vector.h"

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

template <class T>
INLINED void blend_columns_loop(const T* row, const int32_t* first, const int32_t* next, const float* share, float* out,
                                int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i)
    out[i] = (1 - share[i]) * to_float(row[first[i]]) + share[i] * to_float(row[next[i]]);
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

#define KERNELS(T)                                                                                           \
  VECTORIZED void blend_columns(const T* row, const int32_t* first, const int32_t* next, const float* share, \
                                float* out, int64_t count) {                                                 \
    blend_columns_loop(row, first, next, share, out, count);                                                 \
  }                                                                                                          \
  VECTORIZED void blend_rows(const float* first, const float* next, float share, T* out, int64_t count) {    \
    blend_rows_loop(first, next, share, out, count);                                                         \
  }                                                                                                          \
  VECTORIZED void add_row(const T* grad, float share, float* sums, int64_t count) {                          \
    add_row_loop(grad, share, sums, count);                                                                  \
  }                                                                                                          \
  VECTORIZED void store_row(const float* sums, T* out, int64_t count) { store_row_loop(sums, out, count); }
KERNELS(float)
KERNELS(bfloat16)
#undef KERNELS

struct Rows {};
struct Sums {};

// Run a function for every map, on all threads, with the number of values in it and in a resized one.
template <class Run>
void for_maps(const Tensor& given, const Tensor& made, const Run& run) {
  const int64_t maps = given.dim(0) * given.dim(1);
  if (!given.size() || !made.size()) return;
  parallel_ranges(maps, 1, [&](int64_t begin, int64_t end) {
    for (int64_t map = begin; map < end; ++map) run(map * (given.size() / maps), map * (made.size() / maps));
  });
}

template <class T>
void forward_as(const Settings& s, const Tensor& data, const Tensor& out) {
  const int64_t height = data.dim(2), width = data.dim(3);
  const Sources down(height, s.height, s.aligns_corners), across(width, s.width, s.aligns_corners);
  for_maps(data, out, [&](int64_t from, int64_t to) {
    const auto rows = static_cast<float*>(scratch<Rows>(height * s.width * sizeof(float)));
    const T* map = data.as<const T>() + from;
    for (int64_t i = 0; i < height; ++i)
      blend_columns(map + i * width, across.first.data(), across.next.data(), across.share.data(), rows + i * s.width,
                    s.width);
    for (int64_t i = 0; i < s.height; ++i)
      blend_rows(rows + down.first[i] * s.width, rows + down.next[i] * s.width, down.share[i],
                 out.as<T>() + to + i * s.width, s.width);
  });
}

template <class T>
void backward_as(const Settings& s, const Tensor& out_grad, const Tensor& data_grad) {
  const int64_t height = data_grad.dim(2), width = data_grad.dim(3);
  const Sources down(height, s.height, s.aligns_corners), across(width, s.width, s.aligns_corners);
  for_maps(data_grad, out_grad, [&](int64_t to, int64_t from) {
    const auto rows = static_cast<float*>(scratch<Rows>(height * s.width * sizeof(float)));
    const auto sums = static_cast<float*>(scratch<Sums>(width * sizeof(float)));
    std::fill_n(rows, height * s.width, 0.f);
    for (int64_t i = 0; i < s.height; ++i) {
      const T* grad = out_grad.as<const T>() + from + i * s.width;
      add_row(grad, 1 - down.share[i], rows + down.first[i] * s.width, s.width);
      add_row(grad, down.share[i], rows + down.next[i] * s.width, s.width);
    }
    for (int64_t i = 0; i < height; ++i) {
      const float* row = rows + i * s.width;
      std::fill_n(sums, width, 0.f);
      for (int64_t j = 0; j < s.width; ++j) {
        sums[across.first[j]] += (1 - across.share[j]) * row[j];
        sums[across.next[j]] += across.share[j] * row[j];
      }
      store_row(sums, data_grad.as<T>() + to + i * width, width);
    }
  });
}

// Copy maps that keep their size, as MXNet does: 0 times an infinity beside a value would make it NaN.
bool copied(const Tensor& from, const Tensor& to) {
  if (from.dim(2) != to.dim(2) || from.dim(3) != to.dim(3)) return false;
  std::copy_n(from.as<const char>(), from.size() * (from.type == kBfloat16 ? 2 : 4), to.as<char>());
  return true;
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  if (copied(inputs[0], outputs[0])) return;
  (inputs[0].type == kBfloat16 ? forward_as<bfloat16> : forward_as<float>)(Settings(attributes), inputs[0], outputs[0]);
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  if (copied(inputs[0], outputs[0])) return;
  const bool is_low = outputs[0].type == kBfloat16;
  (is_low ? backward_as<bfloat16> : backward_as<float>)(Settings(attributes), inputs[0], outputs[0]);
}

void types(const Attributes&, Types& inputs, Types& outputs) { outputs[0] = inputs[0] = data_type(inputs[0], "data"); }

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  const Settings s(attributes);
  const Shape& data = inputs[0];
  expect_known(data, "data");
  if (data.size() != 4) fail("expected images, received data of shape ", describe(data));
  outputs[0] = {data[0], data[1], static_cast<uint32_t>(s.height), static_cast<uint32_t>(s.width)};
}

}  // namespace

const Operator resize{"_gluon_amp_resize", one_to_one, types, shapes, forward, backward};

}  // namespace gluon_amp
