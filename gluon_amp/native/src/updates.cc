// Updates of many weights in one call, of each value by itself, and the check of their gradients. Operations and their
// order are those of MXNet's sgd_update, sgd_mom_update, nag_mom_update, adam_update and adamw_update, so that results
// have the same bits; LAMB's norms (lamb_update_phase1, norm and lamb_update_phase2) are added up in another order, and
// may differ by rounding.
//
// Inputs are, for every weight: the weight, its gradient, its states. Weights and states are float32 and are written in
// place, gradients may be bfloat16. Attributes: num_weights, lrs and wds with one value a weight, and those in Rates.
// AdamW multiplies by eta too: one for all, or etas.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "operator.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 16384;

constexpr float kNoClip = __builtin_inff();  // so that loops need no branch

struct Rates {
  float lr, wd, rescale, clip, momentum, beta1, beta2, epsilon, eta;
};

// The rates of every weight of a call.
std::vector<Rates> rates_of_weights(const Attributes& attributes, size_t count, double epsilon = 1e-8) {
  const std::vector<double> lrs = attributes.numbers("lrs"), wds = attributes.numbers("wds");
  if (lrs.size() != count || wds.size() != count)
    fail("expected as many lrs and wds as weights, received ", lrs.size(), " lrs and ", wds.size(), " wds for ", count,
         " weights");
  const float limit = attributes.real("clip_gradient", -1);
  const Rates shared{0,
                     0,
                     attributes.real("rescale_grad", 1),
                     limit < 0 ? kNoClip : limit,
                     attributes.real("momentum", 0),
                     attributes.real("beta1", 0.9),
                     attributes.real("beta2", 0.999),
                     attributes.real("epsilon", epsilon),
                     1};
  std::vector<Rates> result(count, shared);
  const bool has_etas = !attributes.text("etas", "").empty();
  const std::vector<double> etas =
      has_etas ? attributes.numbers("etas") : std::vector<double>(count, attributes.real("eta", 1));
  if (etas.size() != count) fail("expected as many etas as weights, received ", etas.size(), " for ", count);
  for (size_t i = 0; i < count; ++i) {
    result[i].lr = static_cast<float>(lrs[i]);
    result[i].wd = static_cast<float>(wds[i]);
    result[i].eta = static_cast<float>(etas[i]);
  }
  return result;
}

INLINED float clipped(float grad, float limit) { return grad > limit ? limit : grad < -limit ? -limit : grad; }

// A piece of a weight that one thread updates, its gradients and its states, which are null where there are none.
struct Piece {
  size_t index;
  int type;  // of the gradients
  const void* grad;
  float *weight, *first, *second;
  int64_t size;
};

// The weights of a call.
template <int kStates>
class Weights {
 public:
  static constexpr int kInputs = 2 + kStates;  // that belong to each

  explicit Weights(const Tensors& inputs) : inputs_(inputs) {
    for (size_t i = 0; i < inputs.size(); ++i) check(i);
    for (size_t i = 0; i < size(); ++i) {
      const Tensor *weight = &inputs[i * kInputs], &grad = weight[1];
      for (int64_t begin = 0; begin < weight->size(); begin += kRange)
        pieces_.push_back({i, grad.type, grad.as<char>() + begin * grad.item(), weight->as<float>() + begin,
                           kStates > 0 ? weight[2].as<float>() + begin : nullptr,
                           kStates > 1 ? weight[3].as<float>() + begin : nullptr,
                           std::min(kRange, weight->size() - begin)});
    }
  }

  size_t size() const { return inputs_.size() / kInputs; }
  const std::vector<Piece>& pieces() const { return pieces_; }
  // Run a function for every piece of every weight, on all threads.
  template <class Function>
  void for_each(const Function& run) const {
    for_pieces(static_cast<int64_t>(pieces_.size()), 1, 1, [&](int64_t i) { run(pieces_[i], i); });
  }

 private:
  // MXNet hands out a copy of an array that oneDNN has put into a layout of its own, and would drop what is written.
  void check(size_t index) const {
    if (index % kInputs != 1 && !inputs_[index].version && inputs_[index].size())
      fail("input ", index, " cannot be written: oneDNN has put it into a layout of its own, or it has no values yet");
  }

  const Tensors& inputs_;
  std::vector<Piece> pieces_;
};

template <int kStates>
Arity update_arity(const Attributes& attributes) {
  return {attributes.count("num_weights") * (2 + kStates), 0};
}

template <int kStates>
void update_types(const Attributes&, Types& inputs, Types&) {
  for (size_t i = 0; i < inputs.size(); ++i)
    if (i % (2 + kStates) == 1)
      inputs[i] = data_type(inputs[i], "a gradient");
    else
      expect_type(inputs[i], kFloat32, "a weight or a state");
}

template <int kStates>
void update_shapes(const Attributes& attributes, Shapes& inputs, Shapes&) {
  rates_of_weights(attributes, inputs.size() / (2 + kStates));  // for errors at the call, not when it is run
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Shape& weight = inputs[i / (2 + kStates) * (2 + kStates)];
    expect_known(weight, "a weight");
    expect_shape(inputs[i], Shape(weight), "a gradient or a state");
  }
}

template <int kStates>
std::vector<int> update_mutated(const Attributes& attributes) {
  std::vector<int> result;
  for (int i = 0; i < update_arity<kStates>(attributes).inputs; ++i)
    if (i % (2 + kStates) != 1) result.push_back(i);
  return result;
}

template <int kStates>
Operator made_update(const char* name, Operator::Compute forward,
                     decltype(Operator::shapes) shapes = update_shapes<kStates>) {
  return {name, update_arity<kStates>, update_types<kStates>, shapes, forward, nullptr, update_mutated<kStates>};
}

struct Sgd {
  static constexpr int kStates = 0;
  static INLINED void step(const Rates& r, float grad, float& weight, float&, float&) {
    // MXNet multiplies the rates first where it does not clip.
    const float change = r.clip == kNoClip ? r.lr * r.rescale * grad : r.lr * clipped(r.rescale * grad, r.clip);
    weight = (1 - r.lr * r.wd) * weight - change;
  }
};

struct SgdMomentum {
  static constexpr int kStates = 1;
  static INLINED void step(const Rates& r, float grad, float& weight, float& momentum, float&) {
    const float change = r.clip == kNoClip ? r.lr * r.rescale * grad : r.lr * clipped(r.rescale * grad, r.clip);
    momentum = r.momentum * momentum - r.lr * r.wd * weight - change;
    weight = weight + momentum;
  }
};

struct Nag {
  static constexpr int kStates = 1;
  static INLINED void step(const Rates& r, float grad, float& weight, float& momentum, float&) {
    const float scaled = clipped(r.rescale * grad, r.clip);
    momentum = r.momentum * momentum;
    weight = weight - momentum + (r.momentum + 1) * (momentum - r.lr * (scaled + r.wd * weight));
    momentum = momentum - r.lr * (scaled + r.wd * weight);  // MXNet has written the weight by then
  }
};

struct Adam {
  static constexpr int kStates = 2;
  static INLINED void step(const Rates& r, float grad, float& weight, float& mean, float& variance) {
    grad = clipped(grad * r.rescale + weight * r.wd, r.clip);
    mean = r.beta1 * mean + (1 - r.beta1) * grad;
    variance = r.beta2 * variance + (1 - r.beta2) * grad * grad;
    weight = weight - r.lr * mean / (__builtin_sqrtf(variance) + r.epsilon);
  }
};

struct AdamW {
  static constexpr int kStates = 2;
  static INLINED void step(const Rates& r, float grad, float& weight, float& mean, float& variance) {
    grad = clipped(r.rescale * grad, r.clip);
    mean = r.beta1 * mean + (1 - r.beta1) * grad;
    variance = r.beta2 * variance + (1 - r.beta2) * (grad * grad);
    weight = weight - r.eta * (r.lr * mean / (__builtin_sqrtf(variance) + r.epsilon) + r.wd * weight);
  }
};

// States that a rule does not have are null: their elements are never touched.
template <class Rule, class Grad>
INLINED void update_loop(const Rates rates, const Grad* grad, float* weight, float* first, float* second,
                         int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    float w = weight[i], s = Rule::kStates > 0 ? first[i] : 0, t = Rule::kStates > 1 ? second[i] : 0;
    Rule::step(rates, to_float(grad[i]), w, s, t);
    weight[i] = w;
    if (Rule::kStates > 0) first[i] = s;
    if (Rule::kStates > 1) second[i] = t;
  }
}

#define KERNEL(Rule)                                                                                               \
  VECTORIZED void update_piece(Rule, Rates rates, const Piece& p) {                                                \
    IN_TYPE(p.type, update_loop<Rule>(rates, static_cast<const T*>(p.grad), p.weight, p.first, p.second, p.size)); \
  }
KERNEL(Sgd)
KERNEL(SgdMomentum)
KERNEL(Nag)
KERNEL(Adam)
KERNEL(AdamW)
#undef KERNEL

template <class Rule>
void update(const Attributes& attributes, const Tensors& inputs, const Tensors&) {
  const Weights<Rule::kStates> weights(inputs);
  const std::vector<Rates> rates = rates_of_weights(attributes, weights.size());
  weights.for_each([&](const Piece& piece, int64_t) { update_piece(Rule(), rates[piece.index], piece); });
}

// LAMB. The direction of a weight is computed again rather than kept.
struct LambRates {
  Rates rates;
  double mean_divisor;  // MXNet divides in double precision here
  float variance_divisor;
};

struct Squares {
  double weight = 0, direction = 0;
};

INLINED float direction_of(const LambRates& r, float mean, float variance, float weight) {
  mean = static_cast<float>(mean / r.mean_divisor);
  variance = variance / r.variance_divisor;
  return mean / (__builtin_sqrtf(variance) + r.rates.epsilon) + r.rates.wd * weight;
}

template <class Grad>
INLINED Squares moments_loop(const LambRates r, const Grad* grad, const float* weight, float* mean, float* variance,
                             int64_t count) {
  float weights = 0, directions = 0;
#pragma omp simd reduction(+ : weights, directions)
  for (int64_t i = 0; i < count; ++i) {
    const float value = clipped(to_float(grad[i]) * r.rates.rescale, r.rates.clip);
    mean[i] = r.rates.beta1 * mean[i] + (1 - r.rates.beta1) * value;
    variance[i] = r.rates.beta2 * variance[i] + (1 - r.rates.beta2) * value * value;
    const float direction = direction_of(r, mean[i], variance[i], weight[i]);
    weights += weight[i] * weight[i];
    directions += direction * direction;
  }
  return {weights, directions};
}

VECTORIZED Squares update_moments(LambRates r, const Piece& p) {
  Squares squares;
  IN_TYPE(p.type, squares = moments_loop(r, static_cast<const T*>(p.grad), p.weight, p.first, p.second, p.size));
  return squares;
}

VECTORIZED void update_weight(LambRates r, float lr, const Piece& p) {
  float* weight = p.weight;
  const float *mean = p.first, *variance = p.second;
#pragma omp simd
  for (int64_t i = 0; i < p.size; ++i) weight[i] = weight[i] - lr * direction_of(r, mean[i], variance[i], weight[i]);
}

std::vector<LambRates> lamb_rates(const Attributes& attributes, size_t count) {
  const std::vector<Rates> rates = rates_of_weights(attributes, count, 1e-6);
  const std::vector<double> steps = attributes.numbers("steps");
  if (steps.size() != count)
    fail("expected as many steps as weights, received ", steps.size(), " steps for ", count, " weights");
  const bool corrected = attributes.flag("bias_correction", true);
  std::vector<LambRates> result;
  for (size_t i = 0; i < count; ++i) {
    const float beta1_power = static_cast<float>(std::pow(rates[i].beta1, steps[i]));
    const float beta2_power = static_cast<float>(std::pow(rates[i].beta2, steps[i]));
    result.push_back({rates[i], corrected ? 1. - beta1_power : 1, corrected ? 1 - beta2_power : 1});
  }
  return result;
}

struct Bounds {
  explicit Bounds(const Attributes& attributes)
      : lower(attributes.real("lower_bound", -1)), upper(attributes.real("upper_bound", -1)) {}
  float lower, upper;
};

float trusted_rate(float lr, const Squares& squares, const Bounds& bounds) {
  float weight = static_cast<float>(std::sqrt(squares.weight));
  const float direction = static_cast<float>(std::sqrt(squares.direction));
  if (bounds.lower >= 0) weight = std::max(weight, bounds.lower);
  if (bounds.upper >= 0) weight = std::min(weight, bounds.upper);
  return weight == 0 || direction == 0 ? lr : lr * weight / direction;
}

void lamb_shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  update_shapes<2>(attributes, inputs, outputs);
  lamb_rates(attributes, inputs.size() / 4);
  Bounds{attributes};
}

void update_lamb(const Attributes& attributes, const Tensors& inputs, const Tensors&) {
  const Weights<2> weights(inputs);
  const std::vector<LambRates> rates = lamb_rates(attributes, weights.size());
  std::vector<Squares> parts(weights.pieces().size()), squares(weights.size());
  weights.for_each([&](const Piece& piece, int64_t i) { parts[i] = update_moments(rates[piece.index], piece); });
  for (size_t i = 0; i < parts.size(); ++i) {
    squares[weights.pieces()[i].index].weight += parts[i].weight;
    squares[weights.pieces()[i].index].direction += parts[i].direction;
  }
  const Bounds bounds(attributes);
  weights.for_each([&](const Piece& piece, int64_t) {
    const LambRates& r = rates[piece.index];
    update_weight(r, trusted_rate(r.rates.lr, squares[piece.index], bounds), piece);
  });
}

// Whether all values of many arrays are finite: 1 or 0, on all threads, at the speed of memory.
constexpr int64_t kChecked = 65536;  // values that a thread checks at once
constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

// Of values that are not negative, bits grow with the value; those of what is not a number are above infinity's.
VECTORIZED int32_t largest_bits(const float* values, int64_t count) {
  int32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    largest = std::max(largest, bits & kMagnitude);
  }
  return largest;
}

void check_all(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  std::atomic<bool> finite{true};
  for (const Tensor& array : inputs) {
    parallel_ranges(array.size(), kChecked, [&](int64_t begin, int64_t end) {
      if (largest_bits(array.as<const float>() + begin, end - begin) >= kInfinity) finite = false;
    });
  }
  *outputs[0].as<float>() = finite ? 1 : 0;
}

Arity check_arity(const Attributes& attributes) { return {attributes.count("num_arrays"), 1}; }

void check_types(const Attributes&, Types& inputs, Types& outputs) {
  for (int& type : inputs) expect_type(type, kFloat32, "an array");
  expect_type(outputs[0], kFloat32, "the output");
}

void check_shapes(const Attributes&, Shapes& inputs, Shapes& outputs) {
  for (const Shape& shape : inputs) expect_known(shape, "an array");
  outputs[0] = {1};
}

}  // namespace

const Operator sgd = made_update<0>("_gluon_amp_sgd", update<Sgd>);
const Operator sgd_momentum = made_update<1>("_gluon_amp_sgd_momentum", update<SgdMomentum>);
const Operator nag = made_update<1>("_gluon_amp_nag", update<Nag>);
const Operator adam = made_update<2>("_gluon_amp_adam", update<Adam>);
const Operator adamw = made_update<2>("_gluon_amp_adamw", update<AdamW>);
const Operator lamb = made_update<2>("_gluon_amp_lamb", update_lamb, lamb_shapes);
const Operator all_finite{"_gluon_amp_all_finite", check_arity, check_types, check_shapes, check_all};

}  // namespace gluon_amp
