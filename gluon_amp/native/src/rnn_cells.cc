#include "exponential.h"
#include "rnn.h"

namespace gluon_amp {

namespace {

INLINED float exponential(float x) {
  x = x < -87.0F ? -87.0F : x;
  return exp_within_range(x > 88.0F ? 88.0F : x);
}
INLINED float sigmoid(float x) { return 1.0F / (1.0F + exponential(-x)); }

// To the last bit but one; near zero by a series, where the difference of 1 and something near it would lose digits.
INLINED float hyperbolic_tangent(float x) {
  const float z = x * x;
  float sum = -5.70498872745e-3F;
  sum = sum * z + 2.06390887954e-2F;
  sum = sum * z - 5.37397155531e-2F;
  sum = sum * z + 1.33314422036e-1F;
  sum = sum * z - 3.33332819422e-1F;
  const float size = __builtin_fabsf(x), far = 1.0F - 2.0F / (1.0F + exponential(2.0F * size));
  return z < 0.390625F ? sum * z * x + x : __builtin_copysignf(far, x);
}

template <class T>
INLINED void lstm(const Row<T>& r) {
  const int64_t n = r.states;
  const float* __restrict bias = r.bias;
  float* __restrict gates = r.gates;
  float* __restrict extra = r.extra;
  const float* cells_before = r.cells_before;
  float *after = r.after, *cells_after = r.cells_after;
  T* __restrict out = r.out;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float in = sigmoid(gates[i] + bias[i]);
    const float forget = sigmoid(gates[n + i] + bias[n + i]);
    const float value = hyperbolic_tangent(gates[2 * n + i] + bias[2 * n + i]);
    const float show = sigmoid(gates[3 * n + i] + bias[3 * n + i]);
    const float cell = forget * cells_before[i] + in * value;
    const float state = show * hyperbolic_tangent(cell);
    gates[i] = in;
    gates[n + i] = forget;
    gates[2 * n + i] = value;
    gates[3 * n + i] = show;
    extra[i] = cell;
    cells_after[i] = cell;
    after[i] = state;
    store(state, &out[i]);
  }
}

template <class T>
INLINED void gru(const Row<T>& r) {
  const int64_t n = r.states;
  const float* __restrict bias = r.bias, * __restrict state_bias = r.state_bias, * __restrict sums = r.sums_of_state;
  float* __restrict gates = r.gates, * __restrict extra = r.extra;
  const float* before = r.before;
  float* after = r.after;
  T* __restrict out = r.out;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float reset = sigmoid(gates[i] + sums[i] + bias[i]);
    const float update = sigmoid(gates[n + i] + sums[n + i] + bias[n + i]);
    const float of_state = sums[2 * n + i] + state_bias[i];
    const float value = hyperbolic_tangent(gates[2 * n + i] + bias[2 * n + i] + reset * of_state);
    const float state = value + update * (before[i] - value);
    gates[i] = reset;
    gates[n + i] = update;
    gates[2 * n + i] = value;
    extra[i] = of_state;
    after[i] = state;
    store(state, &out[i]);
  }
}

template <bool kRectified, class T>
INLINED void plain(const Row<T>& r) {
  const float* __restrict bias = r.bias;
  float* __restrict gates = r.gates;
  float* after = r.after;
  T* __restrict out = r.out;
#pragma omp simd
  for (int64_t i = 0; i < r.states; ++i) {
    const float sum = gates[i] + bias[i];
    const float state = !kRectified ? hyperbolic_tangent(sum) : sum > 0.0F ? sum : 0.0F;
    gates[i] = state;
    after[i] = state;
    store(state, &out[i]);
  }
}

template <class T>
INLINED void lstm_gradient(const RowGradient<T>& r) {
  const int64_t n = r.states;
  const float* __restrict gates = r.gates, * __restrict extra = r.extra, * __restrict out = r.out;
  const float* __restrict cells_before = r.cells_before, * __restrict state = r.state;
  float* __restrict cells = r.cells;
  T* __restrict to = r.to_data;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float in = gates[i], forget = gates[n + i], value = gates[2 * n + i], show = gates[3 * n + i];
    const float shown = hyperbolic_tangent(extra[i]), grad = out[i] + state[i];
    const float cell = cells[i] + grad * show * (1.0F - shown * shown);
    store(cell * value * in * (1.0F - in), &to[i]);
    store(cell * cells_before[i] * forget * (1.0F - forget), &to[n + i]);
    store(cell * in * (1.0F - value * value), &to[2 * n + i]);
    store(grad * shown * show * (1.0F - show), &to[3 * n + i]);
    cells[i] = cell * forget;
  }
}

template <class T>
INLINED void gru_gradient(const RowGradient<T>& r) {
  const int64_t n = r.states;
  const float* __restrict gates = r.gates, * __restrict extra = r.extra, * __restrict out = r.out;
  const T* __restrict before = r.before;
  float* __restrict state = r.state;
  T* __restrict to_data = r.to_data, * __restrict to_state = r.to_state;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float reset = gates[i], update = gates[n + i], value = gates[2 * n + i], grad = out[i] + state[i];
    const float to_value = grad * (1.0F - update) * (1.0F - value * value);
    const float to_reset = to_value * extra[i] * reset * (1.0F - reset);
    const float to_update = grad * (to_float(before[i]) - value) * update * (1.0F - update);
    store(to_reset, &to_data[i]);
    store(to_update, &to_data[n + i]);
    store(to_value, &to_data[2 * n + i]);
    store(to_reset, &to_state[i]);
    store(to_update, &to_state[n + i]);
    store(to_value * reset, &to_state[2 * n + i]);
    state[i] = grad * update;
  }
}

template <bool kRectified, class T>
INLINED void plain_gradient(const RowGradient<T>& r) {
  const float* __restrict gates = r.gates, * __restrict out = r.out, * __restrict state = r.state;
  T* __restrict to = r.to_data;
#pragma omp simd
  for (int64_t i = 0; i < r.states; ++i) {
    const float grad = out[i] + state[i];
    store(!kRectified ? grad * (1.0F - gates[i] * gates[i]) : gates[i] > 0.0F ? grad : 0.0F, &to[i]);
  }
}

template <class T>
INLINED void forward(Cell cell, const Row<T>& r) {
  cell == Cell::kLstm ? lstm(r) : cell == Cell::kGru ? gru(r) : cell == Cell::kTanh ? plain<false>(r) : plain<true>(r);
}

template <class T>
INLINED void backward(Cell cell, const RowGradient<T>& r) {
  cell == Cell::kLstm   ? lstm_gradient(r)
  : cell == Cell::kGru  ? gru_gradient(r)
  : cell == Cell::kTanh ? plain_gradient<false>(r)
                        : plain_gradient<true>(r);
}

}  // namespace

VECTORIZED void forward_row(Cell cell, const Row<float>& row) { forward(cell, row); }
VECTORIZED void forward_row(Cell cell, const Row<bfloat16>& row) { forward(cell, row); }
VECTORIZED void backward_row(Cell cell, const RowGradient<float>& row) { backward(cell, row); }
VECTORIZED void backward_row(Cell cell, const RowGradient<bfloat16>& row) { backward(cell, row); }

VECTORIZED void convert(const float* from, bfloat16* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) store(from[i], &to[i]);
}

}  // namespace gluon_amp
