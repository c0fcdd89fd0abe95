#include "rnn_bfloat16.h"

#include <algorithm>

#include "buffer.h"
#include "exponential.h"

namespace gluon_amp {

namespace {

using namespace onednn;

constexpr int64_t kLeastToShare = 4096;  // values of a step from which on threads share it

// A product of matrices, rows x inner by inner x columns. The second one is in the order that oneDNN likes, or as it is.
struct Product {
  Product(const Desc& a_desc, const Desc& b_desc, const Desc& c_desc, bool adds)
      : a(a_desc),
        c(c_desc),
        primitive(
            "a product of matrices",
            [&](PrimitiveDesc** desc, const Attr* attr) {
              return functions().matmul_primitive_desc_create(desc, engine(), a_desc, b_desc, nullptr,
                                                                      c_desc, attr);
            },
            1, adds) {}

  void run(const void* left, Md right_desc, const void* right, float* product) const {
    primitive.run({{kSrc, a, left}, {kWeightsLayer, right_desc, right}, {kDst, c, product}});
  }
  Md packed() const { return primitive.query(kWeights); }

  Desc a, c;
  Primitive primitive;
};

Desc low(int64_t rows, int64_t columns) { return {{rows, columns}, kBf16}; }
Desc low_transposed(int64_t rows, int64_t columns) { return {{columns, rows}, kBf16, {1, columns}}; }
Desc packed(int64_t rows, int64_t columns) { return Desc::any({rows, columns}, kBf16); }
Desc full(int64_t rows, int64_t columns) { return {{rows, columns}, kF32}; }

// The products of one direction of a layer. `gates` are rows of weights.
struct Products {
  explicit Products(const LayerShape& s)
      : gates(s.gates() * s.states),
        rows(s.steps * s.batch),
        width(s.directions * s.states),
        of_data(low(rows, s.inputs), packed(s.inputs, gates), full(rows, gates), false),
        of_state(low(s.batch, s.states), packed(s.states, gates), full(s.batch, gates), s.cell != Cell::kGru) {}

  int64_t gates, rows, width;
  Product of_data, of_state;
};

struct BackwardProducts {
  explicit BackwardProducts(const LayerShape& s)
      : gates(s.gates() * s.states),
        rows(s.steps * s.batch),
        to_state(low(s.batch, gates), packed(gates, s.states), full(s.batch, s.states), s.cell == Cell::kGru),
        to_data(low(rows, gates), packed(gates, s.inputs), full(rows, s.inputs), false),
        to_data_too(low(rows, gates), packed(gates, s.inputs), full(rows, s.inputs), true),
        to_data_weights(low_transposed(rows, gates), low(rows, s.inputs), full(gates, s.inputs), false),
        to_state_weights(low_transposed(rows, gates), low(rows, s.states), full(gates, s.states), false) {}

  int64_t gates, rows;
  Product to_state, to_data, to_data_too, to_data_weights, to_state_weights;
};

INLINED float exponential(float x) {
  x = x < -87.0F ? -87.0F : x;
  return exp_within_range(x > 88.0F ? 88.0F : x);
}
INLINED float sigmoid(float x) { return 1.0F / (1.0F + exponential(-x)); }
INLINED float hyperbolic_tangent(float x) { return 2.0F * sigmoid(2.0F * x) - 1.0F; }

VECTORIZED void to_bfloat16(const float* from, bfloat16* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) store(from[i], &to[i]);
}

// One sequence of a step. Gates come as sums, and are left as what backward needs.
struct Row {
  int64_t states;
  const float *bias, *state_bias;  // sums of both, but for a GRU's new state
  float* gates;
  const float* sums_of_state;  // GRU's
  float* extra;                // LSTM's cells; GRU's part of the state in the new state
  const float *before, *cells_before;
  float *after, *cells_after;
  bfloat16* out;
};

VECTORIZED void lstm_row(const Row& r) {
  const int64_t n = r.states;
  const float* __restrict bias = r.bias;
  float* __restrict gates = r.gates;
  float* __restrict extra = r.extra;
  const float* cells_before = r.cells_before;
  float *after = r.after, *cells_after = r.cells_after;
  bfloat16* __restrict out = r.out;
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

VECTORIZED void gru_row(const Row& r) {
  const int64_t n = r.states;
  const float *__restrict bias = r.bias, *__restrict state_bias = r.state_bias, *__restrict sums = r.sums_of_state;
  float *__restrict gates = r.gates, *__restrict extra = r.extra;
  const float* before = r.before;
  float* after = r.after;
  bfloat16* __restrict out = r.out;
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

template <bool kRectified>
INLINED void plain_row(const Row& r) {
  const float* __restrict bias = r.bias;
  float* __restrict gates = r.gates;
  float* after = r.after;
  bfloat16* __restrict out = r.out;
#pragma omp simd
  for (int64_t i = 0; i < r.states; ++i) {
    const float sum = gates[i] + bias[i];
    const float state = !kRectified ? hyperbolic_tangent(sum) : sum > 0.0F ? sum : 0.0F;
    gates[i] = state;
    after[i] = state;
    store(state, &out[i]);
  }
}

VECTORIZED void tanh_row(const Row& r) { plain_row<false>(r); }
VECTORIZED void relu_row(const Row& r) { plain_row<true>(r); }

// One sequence of a step of the backward pass. The state's gradient is replaced by that part of the state's before
// which does not go through weights (GRU's); the cells' gradient by that of the cells before.
struct RowGradient {
  int64_t states;
  const float *gates, *extra, *out, *cells_before;
  const bfloat16* before;
  float *state, *cells;
  bfloat16 *to_data, *to_state;  // of the sums; they differ in GRU's new state
};

VECTORIZED void lstm_gradient(const RowGradient& r) {
  const int64_t n = r.states;
  const float *__restrict gates = r.gates, *__restrict extra = r.extra, *__restrict out = r.out;
  const float *__restrict cells_before = r.cells_before, *__restrict state = r.state;
  float* __restrict cells = r.cells;
  bfloat16* __restrict to = r.to_data;
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

VECTORIZED void gru_gradient(const RowGradient& r) {
  const int64_t n = r.states;
  const float *__restrict gates = r.gates, *__restrict extra = r.extra, *__restrict out = r.out;
  const bfloat16* __restrict before = r.before;
  float* __restrict state = r.state;
  bfloat16 *__restrict to_data = r.to_data, *__restrict to_state = r.to_state;
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

VECTORIZED void tanh_gradient(const RowGradient& r) {
  const float *__restrict gates = r.gates, *__restrict out = r.out, *__restrict state = r.state;
  bfloat16* __restrict to = r.to_data;
#pragma omp simd
  for (int64_t i = 0; i < r.states; ++i) store((out[i] + state[i]) * (1.0F - gates[i] * gates[i]), &to[i]);
}

VECTORIZED void relu_gradient(const RowGradient& r) {
  const float *__restrict gates = r.gates, *__restrict out = r.out, *__restrict state = r.state;
  bfloat16* __restrict to = r.to_data;
#pragma omp simd
  for (int64_t i = 0; i < r.states; ++i) store(gates[i] > 0.0F ? out[i] + state[i] : 0.0F, &to[i]);
}

void forward_row(Cell cell, const Row& row) {
  switch (cell) {
    case Cell::kLstm:
      return lstm_row(row);
    case Cell::kGru:
      return gru_row(row);
    case Cell::kTanh:
      return tanh_row(row);
    case Cell::kRelu:
      return relu_row(row);
  }
}

void backward_row(Cell cell, const RowGradient& row) {
  switch (cell) {
    case Cell::kLstm:
      return lstm_gradient(row);
    case Cell::kGru:
      return gru_gradient(row);
    case Cell::kTanh:
      return tanh_gradient(row);
    case Cell::kRelu:
      return relu_gradient(row);
  }
}

// Sums over rows.
VECTORIZED void add_rows(const bfloat16* values, int64_t rows, int64_t columns, float* sums) {
  std::fill_n(sums, columns, 0.0F);
  for (int64_t row = 0; row < rows; ++row, values += columns) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) sums[i] += to_float(values[i]);
  }
}

// Weights in the order that a product wants, from rows of gates, maybe transposed.
Buffer packed_low(const float* weights, int64_t rows, int64_t columns, bool transposed, Md wanted) {
  const Buffer rounded(rows * columns * sizeof(bfloat16));
  const int64_t count = rows * columns, part = 1 << 14;
#pragma omp parallel for
  for (int64_t i = 0; i < count; i += part)
    to_bfloat16(weights + i, rounded.lows() + i, std::min(part, count - i));
  Buffer result(bytes(wanted));
  reorder(transposed ? low_transposed(rows, columns) : low(rows, columns), rounded.data(), wanted, result.data());
  return result;
}

// LSTM's cells after each step, or what a GRU's reset gate multiplies, are kept beside the gates.
bool keeps_extra(const LayerShape& s) { return s.cell == Cell::kLstm || s.cell == Cell::kGru; }

int64_t kept_values(const LayerShape& s) { return s.steps * s.batch * s.states * (s.gates() + keeps_extra(s)); }

std::shared_ptr<const Products> products_of(const LayerShape& s) {
  return cached<Products>(s.key(), [&] { return Products(s); });
}

std::shared_ptr<const BackwardProducts> backward_products_of(const LayerShape& s) {
  return cached<BackwardProducts>(s.key(), [&] { return BackwardProducts(s); });
}

struct Biases {
  Biases(const LayerShape& s, const Parameters& p, int64_t direction) : sums(s.gates() * s.states * sizeof(float)) {
    const float *data = p.biases[2 * direction], *state = p.biases[2 * direction + 1];
    const int64_t apart = s.cell == Cell::kGru ? 2 * s.states : s.gates() * s.states;
    for (int64_t i = 0; i < s.gates() * s.states; ++i) sums.floats()[i] = i < apart ? data[i] + state[i] : data[i];
    of_state = state + (s.cell == Cell::kGru ? apart : 0);
  }
  Buffer sums;
  const float* of_state;
};

void forward_direction(const LayerShape& s, const Parameters& parameters, const LowArrays& a, int64_t direction,
                       float* gates) {
  const auto products = products_of(s);
  const int64_t n = s.states, width = products->width, sums = products->gates, step = s.batch * n;
  const Biases biases(s, parameters, direction);
  {
    const Md wanted = products->of_data.packed();
    const Buffer weights = packed_low(parameters.weights[2 * direction], sums, s.inputs, true, wanted);
    products->of_data.run(a.data, wanted, weights.data(), gates);
  }
  const Md wanted = products->of_state.packed();
  const Buffer weights = packed_low(parameters.weights[2 * direction + 1], sums, n, true, wanted);
  // States apart from those of the other direction: of odd rows within wider ones oneDNN made infinite sums NaN.
  const Buffer states(step * sizeof(bfloat16));
  to_bfloat16(a.states + direction * step, states.lows(), step);
  const bool gru = s.cell == Cell::kGru;
  const Buffer of_state(gru ? s.batch * sums * sizeof(float) : 0);
  float* extra = gates + s.steps * s.batch * sums;
  const float *before = a.states + direction * step, *cells = a.cells ? a.cells + direction * step : nullptr;
  float *after = a.last_states + direction * step, *cells_after = a.last_cells ? a.last_cells + direction * step : nullptr;
  for (int64_t i = 0; i < s.steps; ++i) {
    const int64_t t = direction ? s.steps - 1 - i : i;
    float* here = gates + t * s.batch * sums;
    bfloat16* out = a.out + t * s.batch * width + direction * n;
    products->of_state.run(states.data(), wanted, weights.data(), gru ? of_state.floats() : here);
#pragma omp parallel for if (step >= kLeastToShare)
    for (int64_t row = 0; row < s.batch; ++row) {
      const int64_t at = row * n;
      forward_row(s.cell, {n, biases.sums.floats(), biases.of_state, here + row * sums,
                           gru ? of_state.floats() + row * sums : nullptr, extra + t * step + at, before + at,
                           cells ? cells + at : nullptr, after + at, cells_after ? cells_after + at : nullptr,
                           out + row * width});
      std::copy_n(out + row * width, n, states.lows() + at);
    }
    before = after;
    cells = cells_after;
  }
}

// The states before each step, by steps.
Buffer states_before(const LayerShape& s, const LowArrays& a, int64_t direction) {
  const int64_t n = s.states, step = s.batch * n, width = s.directions * n, first = direction ? s.steps - 1 : 0;
  Buffer states(s.steps * step * sizeof(bfloat16));
  to_bfloat16(a.states + direction * step, states.lows() + first * step, step);
  for (int64_t t = 0; t < s.steps; ++t) {
    if (t == first) continue;
    const bfloat16* from = a.out + (direction ? t + 1 : t - 1) * s.batch * width + direction * n;
    for (int64_t row = 0; row < s.batch; ++row) std::copy_n(from + row * width, n, states.lows() + t * step + row * n);
  }
  return states;
}

void backward_direction(const LayerShape& s, const Parameters& parameters, const LowArrays& a,
                        const Parameters& parameter_gradients, const LowGradients& g, int64_t direction) {
  const auto products = backward_products_of(s);
  const int64_t n = s.states, width = s.directions * n, sums = products->gates, step = s.batch * n;
  const bool gru = s.cell == Cell::kGru, lstm = s.cell == Cell::kLstm;
  const float *gates = a.kept + direction * kept_values(s), *extra = gates + s.steps * s.batch * sums;
  const Buffer before = states_before(s, a, direction);
  const Buffer to_data(products->rows * sums * sizeof(bfloat16));
  const Buffer to_state_apart(gru ? products->rows * sums * sizeof(bfloat16) : 0);
  bfloat16* to_state = gru ? to_state_apart.lows() : to_data.lows();
  float* state = g.states + direction * step;
  std::copy_n(g.last_states + direction * step, step, state);
  float* cells = lstm ? g.cells + direction * step : nullptr;
  if (lstm) std::copy_n(g.last_cells + direction * step, step, cells);
  {
    const Md wanted = products->to_state.packed();
    const Buffer weights = packed_low(parameters.weights[2 * direction + 1], sums, n, false, wanted);
    for (int64_t i = s.steps; i-- > 0;) {
      const int64_t t = direction ? s.steps - 1 - i : i, earlier = direction ? t + 1 : t - 1;
      const float* cells_before = !lstm ? nullptr : i ? extra + earlier * step : a.cells + direction * step;
#pragma omp parallel for if (step >= kLeastToShare)
      for (int64_t row = 0; row < s.batch; ++row) {
        const int64_t at = row * n, sequence = t * s.batch + row;
        backward_row(s.cell, {n, gates + sequence * sums, extra + sequence * n, g.out + sequence * width + direction * n,
                              lstm ? cells_before + at : nullptr, before.lows() + sequence * n, state + at,
                              lstm ? cells + at : nullptr, to_data.lows() + sequence * sums,
                              to_state + sequence * sums});
      }
      products->to_state.run(to_state + t * s.batch * sums, wanted, weights.data(), state);
    }
  }
  const Product& to_inputs = direction ? products->to_data_too : products->to_data;
  const Buffer weights = packed_low(parameters.weights[2 * direction], sums, s.inputs, false, to_inputs.packed());
  to_inputs.run(to_data.data(), to_inputs.packed(), weights.data(), g.data);
  products->to_data_weights.run(to_data.data(), products->to_data_weights.packed(), a.data,
                                parameter_gradients.weights[2 * direction]);
  products->to_state_weights.run(to_state, products->to_state_weights.packed(), before.data(),
                                 parameter_gradients.weights[2 * direction + 1]);
  add_rows(to_data.lows(), products->rows, sums, parameter_gradients.biases[2 * direction]);
  add_rows(to_state, products->rows, sums, parameter_gradients.biases[2 * direction + 1]);
}

}  // namespace

size_t low_workspace_bytes(const LayerShape& shape) { return shape.directions * kept_values(shape) * sizeof(float); }

void low_forward(const LayerShape& s, const Parameters& parameters, const LowArrays& arrays) {
  const Buffer own(s.training ? 0 : kept_values(s) * sizeof(float));
  for (int64_t direction = 0; direction < s.directions; ++direction)
    forward_direction(s, parameters, arrays, direction,
                      s.training ? arrays.kept + direction * kept_values(s) : own.floats());
}

void low_backward(const LayerShape& s, const Parameters& parameters, const LowArrays& arrays,
                  const Parameters& parameter_gradients, const LowGradients& gradients) {
  for (int64_t direction = 0; direction < s.directions; ++direction)
    backward_direction(s, parameters, arrays, parameter_gradients, gradients, direction);
}

}  // namespace gluon_amp
