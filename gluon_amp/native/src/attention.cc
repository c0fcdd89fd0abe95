// Attention of several heads, from projections to mixed values: the matrices of heads are read and written where they
// lie within the projections, so that nothing is split, transposed or joined. Layouts:
//
//   joined       (batch, length, 3 * units): queries, keys and values of all heads, one after another
//   interleaved  (length, batch, 3 * units): queries, keys and values of a head beside each other
//   separate     three inputs (batch, length, units); queries may have another length
//
// Joined and interleaved keys and values may come without queries, which are an input of their own then and may have
// another length.
//
// The attribute `operands` names the inputs in their order: `projections`, or `queries` and `keys_values`, or
// `queries`, `keys` and `values`, and
//
//   bias     float32 (batch, 1 or queries, keys), added to the scores of all heads
//   mask     float32 (batch, 1 or queries, keys): where it is 0 a score is the attribute `masked`; weights are times it
//   lengths  int32 (batch, queries), how many keys each query looks at
//   bits     of which dropout of the weights with the probability `p` is made (dropping.h)
//
// Scores are float32. Backward computes the weights again, which takes no longer than to write and read them.
#include <algorithm>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>

#include "dropping.h"
#include "exponential.h"
#include "onednn.h"

namespace gluon_amp {

namespace {

// What makes weights of the scores of one head. Rows of which there is one for all queries have a step of 0.
struct Head {
  int64_t rows, width;
  const float* bias;
  int64_t bias_step;
  const float* mask;
  int64_t mask_step;
  float masked;
  const int32_t* lengths;
  const Dropping* dropping;  // null where nothing is dropped
  uint64_t first_row;
  float* factors;  // for one row

  int64_t length(int64_t row) const { return lengths ? std::min(std::max<int64_t>(lengths[row], 0), width) : width; }
};

INLINED void scores_to_shares(const Head& head, int64_t row, float* scores) {
  if (head.bias) {
    const float* bias = head.bias + row * head.bias_step;
#pragma omp simd
    for (int64_t i = 0; i < head.width; ++i) scores[i] += bias[i];
  }
  if (head.mask) {
    const float *mask = head.mask + row * head.mask_step, masked = head.masked;
#pragma omp simd
    for (int64_t i = 0; i < head.width; ++i) scores[i] = mask[i] != 0 ? scores[i] : masked;
  }
  softmax(scores, scores, head.length(row), head.width);
}

// What the mask and dropout multiply the shares of a row by; null where that is 1.
INLINED const float* factors_of(const Head& head, int64_t row) {
  const float* mask = head.mask ? head.mask + row * head.mask_step : nullptr;
  if (!head.dropping) return mask;
  write_factors(*head.dropping, head.first_row + static_cast<uint64_t>(row), head.factors, head.width);
  if (mask) {
#pragma omp simd
    for (int64_t i = 0; i < head.width; ++i) head.factors[i] *= mask[i];
  }
  return head.factors;
}

template <class T>
INLINED void write_weights(const Head& head, float* scores, T* weights) {
  const int64_t width = head.width;
  for (int64_t row = 0; row < head.rows; ++row, scores += width, weights += width) {
    scores_to_shares(head, row, scores);
    const float* factors = factors_of(head, row);
    if (factors) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) store(scores[i] * factors[i], &weights[i]);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) store(scores[i], &weights[i]);
    }
  }
}

// The gradients of weights become those of the mask.
INLINED void write_mask_grads(const Head& head, int64_t row, const float* shares, float* weight_grads) {
  if (head.dropping) {
    write_factors(*head.dropping, head.first_row + static_cast<uint64_t>(row), head.factors, head.width);
#pragma omp simd
    for (int64_t i = 0; i < head.width; ++i) weight_grads[i] *= head.factors[i];
  }
#pragma omp simd
  for (int64_t i = 0; i < head.width; ++i) weight_grads[i] *= shares[i];
}

template <class T>
INLINED void write_score_grads(const Head& head, const float* shares, float* weight_grads, T* score_grads) {
  const int64_t width = head.width;
  for (int64_t row = 0; row < head.rows; ++row, shares += width, weight_grads += width, score_grads += width) {
    const int64_t length = head.length(row);
    const float *factors = factors_of(head, row), *mask = head.mask ? head.mask + row * head.mask_step : nullptr;
    float product = 0;
    if (factors) {
#pragma omp simd reduction(+ : product)
      for (int64_t i = 0; i < length; ++i) product += shares[i] * factors[i] * weight_grads[i];
    } else {
#pragma omp simd reduction(+ : product)
      for (int64_t i = 0; i < length; ++i) product += shares[i] * weight_grads[i];
    }
    if (mask) {
#pragma omp simd
      for (int64_t i = 0; i < length; ++i)
        store(mask[i] != 0 ? shares[i] * (factors[i] * weight_grads[i] - product) : 0.f, &score_grads[i]);
    } else if (factors) {
#pragma omp simd
      for (int64_t i = 0; i < length; ++i) store(shares[i] * (factors[i] * weight_grads[i] - product), &score_grads[i]);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < length; ++i) store(shares[i] * (weight_grads[i] - product), &score_grads[i]);
    }
    std::fill(score_grads + length, score_grads + width, T{});
    if (mask) write_mask_grads(head, row, shares, weight_grads);
  }
}

template <class T>
INLINED void add_rows(const T* values, float* sums, int64_t sums_step, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row, values += width, sums += sums_step) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) sums[i] += to_float(values[i]);
  }
}

VECTORIZED void make_weights(const Head& head, float* scores, const Matrices& weights, int64_t offset) {
  IN_TYPE(weights.type, write_weights(head, scores + offset, weights.as<T>() + offset));
}
VECTORIZED void make_score_grads(const Head& head, const float* shares, float* weight_grads,
                                 const Matrices& score_grads, int64_t offset) {
  IN_TYPE(score_grads.type,
          write_score_grads(head, shares + offset, weight_grads + offset, score_grads.as<T>() + offset));
}
VECTORIZED void add_to(float* sums, int64_t sums_step, const Matrices& values, int64_t offset, int64_t rows,
                       int64_t width) {
  IN_TYPE(values.type, add_rows(values.as<const T>() + offset, sums, sums_step, rows, width));
}

enum class Layout { kJoined, kInterleaved, kSeparate };
enum Part { kQueries, kKeys, kValues, kMixed };
// After the parts.
enum Extra { kBias = 3, kMask, kLengths, kBits, kAll };

struct Settings {
  explicit Settings(const Attributes& attributes)
      : heads(attributes.integer("heads", 0)),
        scale(attributes.real("scale", 1)),
        masked(attributes.real("masked", -1e30)) {
    const std::string text = attributes.text("layout");
    if (text == "joined")
      layout = Layout::kJoined;
    else if (text == "interleaved")
      layout = Layout::kInterleaved;
    else if (text == "separate")
      layout = Layout::kSeparate;
    else
      fail("expected joined, interleaved or separate, received layout='", text, "'");
    if (heads < 1) fail("expected one head or more, received heads=", heads);
    find_inputs(attributes.text("operands", is_separate() ? "queries,keys,values" : "projections"));
    if (has(kBits)) probability = drop_probability(attributes);
  }
  bool is_separate() const { return layout == Layout::kSeparate; }
  bool has(int input) const { return places[input] >= 0; }
  // How many parts the input with a part has, and which of them it is.
  int parts(Part part) const { return static_cast<int>(std::count(places, places + kMixed, places[part])); }
  int position(Part part) const { return static_cast<int>(std::count(places, places + part, places[part])); }
  // An input of an operator's; `first` is where the inputs begin.
  const Tensor& of(const Tensors& tensors, int input, int first = 0) const { return tensors[first + places[input]]; }

  Layout layout;
  int64_t heads;
  float scale, masked;
  double probability = 0;
  int places[kAll];  // by Part, then Extra; -1 where there is none
  int count = 0;

 private:
  void find_inputs(const std::string& names) {
    static const char* known[kAll] = {"queries", "keys", "values", "bias", "mask", "lengths", "bits"};
    std::fill(std::begin(places), std::end(places), -1);
    std::istringstream stream(names);
    for (std::string name; std::getline(stream, name, ','); ++count) {
      const auto found = std::find(known, known + kAll, name);
      if (name == "projections" && !is_separate())
        places[kQueries] = places[kKeys] = places[kValues] = count;
      else if (name == "keys_values" && !is_separate())
        places[kKeys] = places[kValues] = count;
      else if (found != known + kAll && (is_separate() || (found - known != kKeys && found - known != kValues)))
        places[found - known] = count;
      else
        fail("expected ", is_separate() ? "queries, keys, values" : "projections, or queries and keys_values",
             ", bias, mask, lengths or bits, received operands='", names, "'");
    }
    if (!has(kQueries) || !has(kKeys) || !has(kValues))
      fail("expected all projections, received operands='", names, "'");
  }
};

// The matrices of all heads, (batch, heads, length, width), within a projection or the output.
Matrices heads_of(const Settings& s, const Tensor& tensor, Part part) {
  const bool is_interleaved = s.layout == Layout::kInterleaved;
  const int64_t batch = tensor.dim(is_interleaved ? 1 : 0), length = tensor.dim(is_interleaved ? 0 : 1);
  const int64_t row = tensor.dim(2), parts = part == kMixed ? 1 : s.parts(part);
  const int64_t units = row / parts, width = units / s.heads;
  const int64_t offset = part == kMixed ? 0 : s.position(part) * (is_interleaved ? width : units);
  return {tensor.as<char>() + offset * tensor.item(),
          tensor.type,
          {batch, s.heads, length, width},
          {is_interleaved ? row : length * row, is_interleaved ? parts * width : width,
           is_interleaved ? batch * row : row, 1}};
}

// Some samples of a batch: so many that what lies between two products stays in the cache.
struct Samples {
  int64_t begin, count;
  Matrices of(const Matrices& all) const {
    Matrices result = all;
    result.data = static_cast<char*>(all.data) + begin * all.strides[0] * all.item();
    result.dims[0] = count;
    return result;
  }
};

struct Sizes {
  Sizes(const Matrices& left, const Matrices& right)
      : batch(left.dims[0]), heads(left.dims[1]), queries(left.rows()), keys(right.rows()) {}
  // Scores, weights or their gradients in an array of their own.
  Matrices matrices(void* data, int type, int64_t samples) const {
    return {data, type, {samples, heads, queries, keys}, {heads * queries * keys, queries * keys, keys, 1}};
  }
  int64_t sample() const { return heads * queries * keys; }

  template <class Run>
  void for_samples(const Run& run) const {
    constexpr int64_t kAtOnce = 1 << 20;
    const int64_t step = std::max<int64_t>(1, kAtOnce / std::max<int64_t>(1, sample()));
    for (int64_t begin = 0; begin < batch; begin += step) run(Samples{begin, std::min(step, batch - begin)});
  }
  int64_t batch, heads, queries, keys;
};

// What the memory of a thread is used for.
struct Scores {};
struct Weights {};
struct WeightGrads {};
struct ScoreGrads {};
struct Factors {};

// A bias, a mask, or the gradient of one, for the rows of a sample.
struct Rows {
  Rows() = default;
  explicit Rows(const Tensor& tensor)
      : data(tensor.as<float>()), sample(tensor.dim(1) * tensor.dim(2)), step(tensor.dim(1) > 1 ? tensor.dim(2) : 0) {}
  float* of(int64_t index) const { return data ? data + index * sample : nullptr; }
  float* data = nullptr;
  int64_t sample = 0, step = 0;
};

// Queries, keys and values, or their gradients, and those of what is between them.
struct Arrays {
  Arrays(const Settings& s, const Tensors& tensors, int first = 0)
      : queries(heads_of(s, s.of(tensors, kQueries, first), kQueries)),
        keys(heads_of(s, s.of(tensors, kKeys, first), kKeys)),
        values(heads_of(s, s.of(tensors, kValues, first), kValues)) {
    if (s.has(kBias)) bias = Rows(s.of(tensors, kBias, first));
    if (s.has(kMask)) mask = Rows(s.of(tensors, kMask, first));
  }
  Matrices queries, keys, values;
  Rows bias, mask;
};

// All that weights are made of.
struct Inputs : Arrays {
  Inputs(const Settings& s, const Tensors& tensors, int first)
      : Arrays(s, tensors, first), sizes(queries, keys), scale(s.scale), masked(s.masked) {
    if (s.has(kLengths)) lengths = s.of(tensors, kLengths, first).as<int32_t>();
    if (s.has(kBits)) dropping = Dropping(s.probability, s.of(tensors, kBits, first));
  }

  // Run a function for every head, on all threads, with what is done to its scores and where they begin.
  template <class Run>
  void for_heads(const Samples& samples, const Run& run) const {
    for_pieces(samples.count * sizes.heads, 1, 1, [&](int64_t index) {
      const int64_t sample = samples.begin + index / sizes.heads;
      const uint64_t first_row = static_cast<uint64_t>((samples.begin * sizes.heads + index) * sizes.queries);
      float* factors = dropping.drops ? static_cast<float*>(scratch<Factors>(sizes.keys * sizeof(float))) : nullptr;
      const Head head{sizes.queries,
                      sizes.keys,
                      bias.of(sample),
                      bias.step,
                      mask.of(sample),
                      mask.step,
                      masked,
                      lengths ? lengths + sample * sizes.queries : nullptr,
                      dropping.drops ? &dropping : nullptr,
                      first_row,
                      factors};
      run(head, index * sizes.queries * sizes.keys);
    });
  }

  // Write the weights of some samples, and the shares that they are made of, into memory of the thread.
  std::pair<Matrices, float*> weights(const Samples& samples) const {
    const int64_t count = samples.count * sizes.sample();
    const auto scores = static_cast<float*>(scratch<Scores>(count * sizeof(float)));
    const Matrices result = sizes.matrices(scratch<Weights>(count * sizeof(float)), queries.type, samples.count);
    multiply(samples.of(queries), samples.of(keys).transposed(), sizes.matrices(scores, kFloat32, samples.count),
             scale);
    for_heads(samples, [&](const Head& head, int64_t offset) { make_weights(head, scores, result, offset); });
    return {result, scores};
  }

  Sizes sizes;
  float scale, masked;
  const int32_t* lengths = nullptr;
  Dropping dropping;
};

// Add what all heads give to the gradient of a bias or a mask.
void add_heads(const Sizes& sizes, const Samples& samples, const Matrices& values, const Rows& sums) {
  for_pieces(samples.count, 1, 1, [&](int64_t sample) {
    for (int64_t i = 0; i < sizes.heads; ++i)
      add_to(sums.of(samples.begin + sample), sums.step, values,
             sample * sizes.sample() + i * sizes.queries * sizes.keys, sizes.queries, sizes.keys);
  });
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const Inputs from(s, inputs, 0);
  const Matrices mixed = heads_of(s, outputs[0], kMixed);
  from.sizes.for_samples([&](const Samples& samples) {
    multiply(from.weights(samples).first, samples.of(from.values), samples.of(mixed));
  });
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const Inputs from(s, inputs, 1);
  const Arrays grads(s, outputs);
  const Matrices mixed_grad = heads_of(s, inputs[0], kMixed);
  for (int extra : {kBias, kMask, kLengths, kBits})
    if (s.has(extra)) clear(s.of(outputs, extra));
  const Sizes& sizes = from.sizes;
  sizes.for_samples([&](const Samples& samples) {
    const auto [weights, shares] = from.weights(samples);
    multiply(weights.transposed(), samples.of(mixed_grad), samples.of(grads.values));
    const int64_t bytes = samples.count * sizes.sample() * static_cast<int64_t>(sizeof(float));
    const Matrices weight_grads = sizes.matrices(scratch<WeightGrads>(bytes), kFloat32, samples.count);
    const Matrices score_grads = sizes.matrices(scratch<ScoreGrads>(bytes), weights.type, samples.count);
    multiply(samples.of(mixed_grad), samples.of(from.values).transposed(), weight_grads);
    const float* made = shares;
    from.for_heads(samples, [&](const Head& head, int64_t offset) {
      make_score_grads(head, made, weight_grads.as<float>(), score_grads, offset);
    });
    if (s.has(kBias)) add_heads(sizes, samples, score_grads, grads.bias);
    if (s.has(kMask)) add_heads(sizes, samples, weight_grads, grads.mask);
    multiply(score_grads, samples.of(from.keys), samples.of(grads.queries), s.scale);
    multiply(score_grads.transposed(), samples.of(from.queries), samples.of(grads.keys), s.scale);
  });
}

void types(const Attributes& attributes, Types& inputs, Types& outputs) {
  const Settings s(attributes);
  outputs[0] = data_type(inputs[s.places[kQueries]], "the first projection");
  for (int part : {kQueries, kKeys, kValues}) expect_type(inputs[s.places[part]], outputs[0], "another projection");
  if (s.has(kBias)) expect_type(inputs[s.places[kBias]], kFloat32, "the bias");
  if (s.has(kMask)) expect_type(inputs[s.places[kMask]], kFloat32, "the mask");
  if (s.has(kLengths)) expect_type(inputs[s.places[kLengths]], kInt32, "the lengths");
  if (s.has(kBits)) expect_type(inputs[s.places[kBits]], kFloat32, "the random bits");
}

// Let rows for all heads, one for all queries or one for each, have their shape.
void expect_rows(Shape& shape, uint32_t batch, uint32_t queries, uint32_t keys, const char* name) {
  expect_known(shape, name);
  const bool has_rows = shape.size() == 3 && shape[1] != 1;
  expect_shape(shape, {batch, has_rows ? queries : 1, keys}, name);
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  onednn::functions();  // for errors at the call, not when it is run
  const Settings s(attributes);
  for (Part part : {kQueries, kKeys, kValues}) {
    const Shape& shape = inputs[s.places[part]];
    const uint32_t multiple = static_cast<uint32_t>(s.parts(part) * s.heads);
    expect_known(shape, "a projection");
    if (shape.size() != 3 || shape[2] % multiple)
      fail("expected three dimensions, the last a multiple of ", multiple, ", received a projection of shape ",
           describe(shape));
  }
  const bool is_interleaved = s.layout == Layout::kInterleaved;
  const Shape& first = inputs[s.places[kQueries]];
  const uint32_t units = first[2] / static_cast<uint32_t>(s.parts(kQueries));
  const uint32_t batch = first[is_interleaved], queries = first[!is_interleaved];
  const uint32_t keys = inputs[s.places[kKeys]][!is_interleaved];
  for (Part part : {kKeys, kValues}) {
    const uint32_t row = units * static_cast<uint32_t>(s.parts(part));
    expect_shape(inputs[s.places[part]], is_interleaved ? Shape{keys, batch, row} : Shape{batch, keys, row},
                 "keys or values");
  }
  if (s.has(kBias)) expect_rows(inputs[s.places[kBias]], batch, queries, keys, "the bias");
  if (s.has(kMask)) expect_rows(inputs[s.places[kMask]], batch, queries, keys, "the mask");
  if (s.has(kLengths)) expect_shape(inputs[s.places[kLengths]], {batch, queries}, "the lengths");
  if (s.has(kBits)) expect_shape(inputs[s.places[kBits]], {kKeyBits}, "the random bits");
  outputs[0] = {first[0], first[1], units};
}

Arity arity(const Attributes& attributes) { return {Settings(attributes).count, 1}; }

}  // namespace

const Operator attention{"_gluon_amp_attention", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
