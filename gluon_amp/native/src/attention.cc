// Attention of several heads, from projections to mixed values: the matrices of heads are read and written where they
// lie within the projections, so that nothing is split, transposed or joined. Layouts:
//
//   joined       (batch, length, 3 * units): queries, keys and values of all heads, one after another
//   interleaved  (length, batch, 3 * units): queries, keys and values of a head beside each other
//   separate     three inputs (batch, length, units); queries may have another length
//
// A bias, float32 (batch, 1 or queries, keys), is added to the scores of all heads. Scores are float32. Backward computes
// the weights again, which takes no longer than to write and read them.
#include <algorithm>

#include "families.h"
#include "operator.h"
#include "product.h"
#include "softmax.h"
#include "vector.h"

namespace gluon_amp {

namespace {

#define KERNELS(T)                                                                                                  \
  VECTORIZED void weights_kernel(float* scores, const float* bias, int64_t bias_step, T* weights, int64_t rows,     \
                                 int64_t width) {                                                                   \
    for (int64_t row = 0; row < rows; ++row)                                                                        \
      softmax(scores + row * width, bias ? bias + row * bias_step : nullptr, weights + row * width, width);         \
  }                                                                                                                 \
  VECTORIZED void scores_kernel(const T* weights, const float* weight_grads, T* score_grads, int64_t rows,          \
                                int64_t width) {                                                                    \
    for (int64_t row = 0; row < rows; ++row)                                                                        \
      softmax_backward(weights + row * width, weight_grads + row * width, score_grads + row * width, width);        \
  }                                                                                                                 \
  VECTORIZED void add_kernel(const T* values, float* sums, int64_t sums_step, int64_t rows, int64_t width) {        \
    for (int64_t row = 0; row < rows; ++row) {                                                                      \
      float* sum = sums + row * sums_step;                                                                          \
      _Pragma("omp simd") for (int64_t i = 0; i < width; ++i) sum[i] += to_float(values[row * width + i]);          \
    }                                                                                                               \
  }
KERNELS(float)
KERNELS(bfloat16)
#undef KERNELS

enum class Layout { kJoined, kInterleaved, kSeparate };

struct Settings {
  explicit Settings(const Attributes& attributes)
      : heads(attributes.integer("heads", 0)),
        scale(static_cast<float>(attributes.number("scale", 1))),
        is_biased(attributes.flag("bias", false)) {
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
  }
  int projections() const { return layout == Layout::kSeparate ? 3 : 1; }

  Layout layout;
  int64_t heads;
  float scale;
  bool is_biased;
};

enum Part { kQueries, kKeys, kValues, kMixed };

// The matrices of all heads, (batch, heads, length, width), within a projection or the output.
Matrices heads_of(const Settings& s, const Tensor& tensor, Part part) {
  const bool is_interleaved = s.layout == Layout::kInterleaved;
  const int64_t batch = tensor.dim(is_interleaved ? 1 : 0), length = tensor.dim(is_interleaved ? 0 : 1);
  const int64_t row = tensor.dim(2), parts = part == kMixed || s.layout == Layout::kSeparate ? 1 : 3;
  const int64_t units = row / parts, width = units / s.heads;
  const int64_t offset = parts == 1 ? 0 : part * (is_interleaved ? width : units);
  const int64_t bytes = tensor.type == kBfloat16 ? 2 : 4;
  return {tensor.as<char>() + offset * bytes,
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
    result.data = static_cast<char*>(all.data) + begin * all.strides[0] * (all.type == kBfloat16 ? 2 : 4);
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
struct ScoreGrads {};

// One range is the rows of one head.
template <class Run>
void for_heads(const Sizes& sizes, const Samples& samples, const Run& run) {
  parallel_ranges(samples.count * sizes.heads, 1, [&](int64_t head, int64_t) {
    run(samples.begin + head / sizes.heads, head * sizes.queries * sizes.keys);
  });
}

// A bias, or its gradient, for the rows of a sample.
struct Bias {
  Bias() = default;
  explicit Bias(const Tensor& tensor)
      : data(tensor.as<float>()), sample(tensor.dim(1) * tensor.dim(2)), step(tensor.dim(1) > 1 ? tensor.dim(2) : 0) {}
  float* of(int64_t index) const { return data ? data + index * sample : nullptr; }
  float* data = nullptr;
  int64_t sample = 0, step = 0;
};

// Write the weights of some samples into memory of the thread.
template <class T>
Matrices weights_of(const Settings& s, const Sizes& sizes, const Samples& samples, const Matrices& queries,
                    const Matrices& keys, const Bias& bias) {
  const int64_t count = samples.count * sizes.sample();
  const auto scores = static_cast<float*>(scratch<Scores>(count * sizeof(float)));
  const auto weights = static_cast<T*>(scratch<Weights>(count * sizeof(T)));
  multiply(samples.of(queries), samples.of(keys).transposed(), sizes.matrices(scores, kFloat32, samples.count), s.scale);
  for_heads(sizes, samples, [&](int64_t sample, int64_t offset) {
    weights_kernel(scores + offset, bias.of(sample), bias.step, weights + offset, sizes.queries, sizes.keys);
  });
  return sizes.matrices(weights, queries.type, samples.count);
}

// Queries, keys and values, or their gradients.
struct Projections {
  Projections(const Settings& s, const Tensor* tensors)
      : queries(heads_of(s, tensors[0], kQueries)),
        keys(heads_of(s, tensors[s.projections() / 2], kKeys)),
        values(heads_of(s, tensors[s.projections() - 1], kValues)),
        bias(s.is_biased ? Bias(tensors[s.projections()]) : Bias()) {}
  Matrices queries, keys, values;
  Bias bias;
};

template <class T>
void forward_as(const Settings& s, const Tensors& inputs, const Tensors& outputs) {
  const Projections from(s, inputs.data());
  const Matrices mixed = heads_of(s, outputs[0], kMixed);
  const Sizes sizes(from.queries, from.keys);
  sizes.for_samples([&](const Samples& samples) {
    const Matrices weights = weights_of<T>(s, sizes, samples, from.queries, from.keys, from.bias);
    multiply(weights, samples.of(from.values), samples.of(mixed));
  });
}

template <class T>
void backward_as(const Settings& s, const Tensors& inputs, const Tensors& outputs) {
  const Projections from(s, &inputs[1]), grads(s, outputs.data());
  const Matrices mixed_grad = heads_of(s, inputs[0], kMixed);
  if (s.is_biased) std::fill_n(grads.bias.data, outputs.back().size(), 0.f);
  const Sizes sizes(from.queries, from.keys);
  sizes.for_samples([&](const Samples& samples) {
    const Matrices weights = weights_of<T>(s, sizes, samples, from.queries, from.keys, from.bias);
    multiply(weights.transposed(), samples.of(mixed_grad), samples.of(grads.values));
    const int64_t count = samples.count * sizes.sample(), head = sizes.queries * sizes.keys;
    const auto weight_grads = static_cast<float*>(scratch<Scores>(count * sizeof(float)));
    const auto score_grads = static_cast<T*>(scratch<ScoreGrads>(count * sizeof(T)));
    multiply(samples.of(mixed_grad), samples.of(from.values).transposed(),
             sizes.matrices(weight_grads, kFloat32, samples.count));
    for_heads(sizes, samples, [&](int64_t, int64_t offset) {
      scores_kernel(static_cast<const T*>(weights.data) + offset, weight_grads + offset, score_grads + offset,
                    sizes.queries, sizes.keys);
    });
    if (s.is_biased)
      parallel_ranges(samples.count, 1, [&](int64_t sample, int64_t) {
        for (int64_t i = 0; i < sizes.heads; ++i)
          add_kernel(score_grads + sample * sizes.sample() + i * head, grads.bias.of(samples.begin + sample),
                     grads.bias.step, sizes.queries, sizes.keys);
      });
    const Matrices scores = sizes.matrices(score_grads, weights.type, samples.count);
    multiply(scores, samples.of(from.keys), samples.of(grads.queries), s.scale);
    multiply(scores.transposed(), samples.of(from.queries), samples.of(grads.keys), s.scale);
  });
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  (inputs[0].type == kBfloat16 ? forward_as<bfloat16> : forward_as<float>)(Settings(attributes), inputs, outputs);
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  (inputs[1].type == kBfloat16 ? backward_as<bfloat16> : backward_as<float>)(Settings(attributes), inputs, outputs);
}

void types(const Attributes& attributes, Types& inputs, Types& outputs) {
  const Settings s(attributes);
  outputs[0] = inputs[0] = data_type(inputs[0], "the first projection");
  for (int i = 1; i < s.projections(); ++i) expect_type(inputs[i], inputs[0], "another projection");
  if (s.is_biased) expect_type(inputs.back(), kFloat32, "the bias");
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  onednn::functions();  // for errors at the call, not when it is run
  const Settings s(attributes);
  const uint32_t heads = static_cast<uint32_t>(s.heads), parts = s.projections() == 1 ? 3 : 1;
  for (int i = 0; i < s.projections(); ++i) {
    expect_known(inputs[i], "a projection");
    if (inputs[i].size() != 3 || inputs[i][2] % (parts * heads))
      fail("expected three dimensions, the last a multiple of ", parts * heads, ", received a projection of shape ",
           describe(inputs[i]));
  }
  const bool is_interleaved = s.layout == Layout::kInterleaved;
  const uint32_t units = inputs[0][2] / parts, batch = inputs[0][is_interleaved], queries = inputs[0][!is_interleaved];
  const uint32_t keys = s.projections() == 1 ? queries : inputs[1][1];
  for (int i = 1; i < s.projections(); ++i) expect_shape(inputs[i], {batch, keys, units}, "keys or values");
  if (s.is_biased) {
    expect_known(inputs.back(), "the bias");
    const bool has_rows = inputs.back().size() == 3 && inputs.back()[1] != 1;
    expect_shape(inputs.back(), {batch, has_rows ? queries : 1, keys}, "the bias");
  }
  outputs[0] = {inputs[0][0], inputs[0][1], units};
}

Arity arity(const Attributes& attributes) {
  const Settings s(attributes);
  return {s.projections() + s.is_biased, 1};
}

}  // namespace

const Operator attention{"_gluon_amp_attention", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
