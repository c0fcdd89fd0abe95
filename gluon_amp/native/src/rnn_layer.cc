#include <algorithm>
#include <type_traits>

#include "rnn.h"

namespace gluon_amp {

namespace {

using namespace onednn;

constexpr int64_t kLeastToShare = 4096;  // values of a step from which on threads share it

// A product of matrices, rows x inner by inner x columns.
struct Product {
  Product(const Desc& a_desc, const Desc& b_desc, const Desc& c_desc, bool adds)
      : a(a_desc),
        c(c_desc),
        primitive(
            "a product of matrices",
            [&](PrimitiveDesc** desc, const Attr* attr) {
              return functions().matmul_primitive_desc_create(desc, engine(), a_desc, b_desc, nullptr, c_desc, attr);
            },
            1, adds) {}

  void run(const void* left, const void* right, float* product) const {
    primitive.run({{kSrc, a, left}, {kWeightsLayer, order(), right}, {kDst, c, product}});
  }
  Md order() const { return primitive.query(kWeights); }  // of the second one

  Desc a, c;
  Primitive primitive;
};

// Descriptions of matrices of a layer's type, and of sums.
struct Kind {
  explicit Kind(const LayerShape& s) : type(data_type_of(s.type)) {}
  Desc plain(int64_t rows, int64_t columns) const { return {{rows, columns}, type}; }
  Desc transposed(int64_t rows, int64_t columns) const { return {{columns, rows}, type, {1, columns}}; }
  static Desc sums(int64_t rows, int64_t columns) { return {{rows, columns}, kF32}; }
  // A product with weights that lie as described, in the order that oneDNN likes; as they are where that is a plain
  // one, and they need not be rounded.
  Product with_weights(const Desc& a, const Desc& lie, int64_t inner, int64_t columns, const Desc& c, bool adds) const {
    Product liked(a, Desc::any({inner, columns}, type), c, adds);
    const bool is_plain = type == kF32 && are_equal(liked.order(), plain(inner, columns));
    return is_plain ? Product(a, lie, c, adds) : liked;
  }
  DataType type;
};

// The products of one direction of a layer. `gates` are rows of weights.
struct Products {
  explicit Products(const LayerShape& s, Kind k)
      : gates(s.gates() * s.states),
        rows(s.steps * s.batch),
        width(s.directions * s.states),
        of_data(k.with_weights(k.plain(rows, s.inputs), k.transposed(gates, s.inputs), s.inputs, gates,
                               k.sums(rows, gates), false)),
        of_state(k.with_weights(k.plain(s.batch, s.states), k.transposed(gates, s.states), s.states, gates,
                                k.sums(s.batch, gates), s.cell != Cell::kGru)) {}

  int64_t gates, rows, width;
  Product of_data, of_state;
};

struct BackwardProducts {
  explicit BackwardProducts(const LayerShape& s, Kind k)
      : gates(s.gates() * s.states),
        rows(s.steps * s.batch),
        to_state(k.with_weights(k.plain(s.batch, gates), k.plain(gates, s.states), gates, s.states,
                                k.sums(s.batch, s.states), s.cell == Cell::kGru)),
        to_data(k.with_weights(k.plain(rows, gates), k.plain(gates, s.inputs), gates, s.inputs, k.sums(rows, s.inputs),
                               false)),
        to_data_too(k.with_weights(k.plain(rows, gates), k.plain(gates, s.inputs), gates, s.inputs,
                                   k.sums(rows, s.inputs), true)),
        to_data_weights(k.transposed(rows, gates), k.plain(rows, s.inputs), k.sums(gates, s.inputs), false),
        to_state_weights(k.transposed(rows, gates), k.plain(rows, s.states), k.sums(gates, s.states), false) {}

  int64_t gates, rows;
  Product to_state, to_data, to_data_too, to_data_weights, to_state_weights;
};

template <class T>
std::shared_ptr<const T> products_of(const LayerShape& s) {
  return cached<T>(s.key(), [&] { return T(s, Kind(s)); });
}

// Sums over rows.
template <class T>
INLINED void add_rows_loop(const T* values, int64_t rows, int64_t columns, float* sums) {
  std::fill_n(sums, columns, 0.0F);
  for (int64_t row = 0; row < rows; ++row, values += columns) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) sums[i] += to_float(values[i]);
  }
}

VECTORIZED void add_rows(const void* values, int type, int64_t rows, int64_t columns, float* sums) {
  IN_TYPE(type, add_rows_loop(static_cast<const T*>(values), rows, columns, sums));
}

void reorder(Md from, const void* source, Md to, void* target) {
  Primitive("a reordering of weights", [&](PrimitiveDesc** desc, const Attr* attr) {
    return functions().reorder_primitive_desc_create(desc, from, engine(), to, engine(), attr);
  }).run({{kSrc, from, source}, {kDst, to, target}});
}

struct Rounded {};
const void* in_type(const float* weights, int64_t, float*) { return weights; }
const void* in_type(const float* weights, int64_t count, bfloat16*) {
  constexpr int64_t kPart = 1 << 14;
  auto* rounded = static_cast<bfloat16*>(scratch<Rounded>(count * sizeof(bfloat16)));
#pragma omp parallel for
  for (int64_t i = 0; i < count; i += kPart) convert(weights + i, rounded + i, std::min(kPart, count - i));
  return rounded;
}

// Weights in the order that a product wants, from a matrix described as it lies: what it is made of, or memory that
// lasts until the next ones are made.
struct Packed {};
template <class T>
const void* packed(const float* weights, const Desc& desc, int64_t count, const Product& product) {
  if (std::is_same<T, float>() && are_equal(desc, product.order())) return weights;
  void* result = scratch<Packed>(bytes(product.order()));
  reorder(desc, in_type(weights, count, static_cast<T*>(nullptr)), product.order(), result);
  return result;
}

// LSTM's cells after each step, or what a GRU's reset gate multiplies, are kept beside the gates.
bool keeps_extra(const LayerShape& s) { return s.cell == Cell::kLstm || s.cell == Cell::kGru; }

int64_t kept_values(const LayerShape& s) { return s.steps * s.batch * s.states * (s.gates() + keeps_extra(s)); }

struct Biases {
  Biases(const LayerShape& s, const Parameters& p, int64_t direction) : sums(s.gates() * s.states * sizeof(float)) {
    const float *data = p.biases[2 * direction], *state = p.biases[2 * direction + 1];
    const int64_t apart = s.cell == Cell::kGru ? 2 * s.states : s.gates() * s.states;
    for (int64_t i = 0; i < s.gates() * s.states; ++i) sums.as<float>()[i] = i < apart ? data[i] + state[i] : data[i];
    of_state = state + (s.cell == Cell::kGru ? apart : 0);
  }
  Buffer sums;
  const float* of_state;
};

template <class T>
void forward_direction(const LayerShape& s, const Parameters& parameters, const LayerArrays& a, int64_t direction,
                       float* gates) {
  const auto products = products_of<Products>(s);
  const Kind kind(s);
  const int64_t n = s.states, width = products->width, sums = products->gates, step = s.batch * n;
  const Biases biases(s, parameters, direction);
  products->of_data.run(
      a.data,
      packed<T>(parameters.weights[2 * direction], kind.transposed(sums, s.inputs), sums * s.inputs, products->of_data),
      gates);
  const void* weights =
      packed<T>(parameters.weights[2 * direction + 1], kind.transposed(sums, n), sums * n, products->of_state);
  // States apart from those of the other direction: of odd rows within wider ones oneDNN made infinite sums NaN.
  const Buffer states(step * sizeof(T));
  convert(a.states + direction * step, states.as<T>(), step);
  const bool gru = s.cell == Cell::kGru;
  const Buffer of_state(gru ? s.batch * sums * sizeof(float) : 0);
  float* extra = gates + s.steps * s.batch * sums;
  const float *before = a.states + direction * step, *cells = a.cells ? a.cells + direction * step : nullptr;
  float* after = a.last_states + direction * step;
  float* cells_after = a.last_cells ? a.last_cells + direction * step : nullptr;
  for (int64_t i = 0; i < s.steps; ++i) {
    const int64_t t = direction ? s.steps - 1 - i : i;
    float* here = gates + t * s.batch * sums;
    T* out = static_cast<T*>(a.out) + t * s.batch * width + direction * n;
    products->of_state.run(states.data(), weights, gru ? of_state.as<float>() : here);
#pragma omp parallel for if (step >= kLeastToShare)
    for (int64_t row = 0; row < s.batch; ++row) {
      const int64_t at = row * n;
      forward_row(s.cell, Row<T>{n, biases.sums.as<float>(), biases.of_state, here + row * sums,
                                 gru ? of_state.as<float>() + row * sums : nullptr, extra + t * step + at, before + at,
                                 cells ? cells + at : nullptr, after + at, cells_after ? cells_after + at : nullptr,
                                 out + row * width});
      std::copy_n(out + row * width, n, states.as<T>() + at);
    }
    before = after;
    cells = cells_after;
  }
}

// The states before each step, by steps.
template <class T>
Buffer states_before(const LayerShape& s, const LayerArrays& a, int64_t direction) {
  const int64_t n = s.states, step = s.batch * n, width = s.directions * n, first = direction ? s.steps - 1 : 0;
  Buffer states(s.steps * step * sizeof(T));
  convert(a.states + direction * step, states.as<T>() + first * step, step);
  for (int64_t t = 0; t < s.steps; ++t) {
    if (t == first) continue;
    const T* from = static_cast<const T*>(a.out) + (direction ? t + 1 : t - 1) * s.batch * width + direction * n;
    for (int64_t row = 0; row < s.batch; ++row) std::copy_n(from + row * width, n, states.as<T>() + t * step + row * n);
  }
  return states;
}

template <class T>
void backward_direction(const LayerShape& s, const Parameters& parameters, const LayerArrays& a,
                        const Parameters& parameter_gradients, const LayerGradients& g, int64_t direction) {
  const auto products = products_of<BackwardProducts>(s);
  const Kind kind(s);
  const int64_t n = s.states, width = s.directions * n, sums = products->gates, step = s.batch * n;
  const bool gru = s.cell == Cell::kGru, lstm = s.cell == Cell::kLstm;
  const float *gates = static_cast<const float*>(a.kept) + direction * kept_values(s),
              *extra = gates + s.steps * s.batch * sums;
  const Buffer before = states_before<T>(s, a, direction);
  const Buffer to_data(products->rows * sums * sizeof(T));
  const Buffer to_state_apart(gru ? products->rows * sums * sizeof(T) : 0);
  T* to_state = gru ? to_state_apart.as<T>() : to_data.as<T>();
  float* state = g.states + direction * step;
  std::copy_n(g.last_states + direction * step, step, state);
  float* cells = lstm ? g.cells + direction * step : nullptr;
  if (lstm) std::copy_n(g.last_cells + direction * step, step, cells);
  const void* weights =
      packed<T>(parameters.weights[2 * direction + 1], kind.plain(sums, n), sums * n, products->to_state);
  for (int64_t i = s.steps; i-- > 0;) {
    const int64_t t = direction ? s.steps - 1 - i : i, earlier = direction ? t + 1 : t - 1;
    const float* cells_before = !lstm ? nullptr : i ? extra + earlier * step : a.cells + direction * step;
#pragma omp parallel for if (step >= kLeastToShare)
    for (int64_t row = 0; row < s.batch; ++row) {
      const int64_t at = row * n, sequence = t * s.batch + row;
      backward_row(s.cell, RowGradient<T>{n, gates + sequence * sums, extra + sequence * n,
                                          g.out + sequence * width + direction * n, lstm ? cells_before + at : nullptr,
                                          before.as<T>() + sequence * n, state + at, lstm ? cells + at : nullptr,
                                          to_data.as<T>() + sequence * sums, to_state + sequence * sums});
    }
    products->to_state.run(to_state + t * s.batch * sums, weights, state);
  }
  const Product& to_inputs = direction ? products->to_data_too : products->to_data;
  to_inputs.run(to_data.data(),
                packed<T>(parameters.weights[2 * direction], kind.plain(sums, s.inputs), sums * s.inputs, to_inputs),
                g.data);
  products->to_data_weights.run(to_data.data(), a.data, parameter_gradients.weights[2 * direction]);
  products->to_state_weights.run(to_state, before.data(), parameter_gradients.weights[2 * direction + 1]);
  add_rows(to_data.data(), s.type, products->rows, sums, parameter_gradients.biases[2 * direction]);
  add_rows(to_state, s.type, products->rows, sums, parameter_gradients.biases[2 * direction + 1]);
}

}  // namespace

size_t kept_bytes(const LayerShape& shape) { return shape.directions * kept_values(shape) * sizeof(float); }

void forward_layer(const LayerShape& s, const Parameters& parameters, const LayerArrays& arrays) {
  const Buffer own(s.training ? 0 : kept_values(s) * sizeof(float));
  for (int64_t direction = 0; direction < s.directions; ++direction) {
    float* gates = s.training ? static_cast<float*>(arrays.kept) + direction * kept_values(s) : own.as<float>();
    IN_TYPE(s.type, forward_direction<T>(s, parameters, arrays, direction, gates));
  }
}

void backward_layer(const LayerShape& s, const Parameters& parameters, const LayerArrays& arrays,
                    const Parameters& parameter_gradients, const LayerGradients& gradients) {
  for (int64_t direction = 0; direction < s.directions; ++direction)
    IN_TYPE(s.type, backward_direction<T>(s, parameters, arrays, parameter_gradients, gradients, direction));
}

}  // namespace gluon_amp
