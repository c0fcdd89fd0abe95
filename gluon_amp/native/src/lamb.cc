// LAMB as MXNet's lamb_update_phase1, norm and lamb_update_phase2 compute it. Only the norms are added up in another
// order, so that results may differ by rounding. The direction of a weight is computed again rather than kept.
#include <cmath>

#include "families.h"
#include "updates.h"

namespace gluon_amp {

namespace {

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

#define KERNEL(Grad)                                                                                                  \
  VECTORIZED Squares moments_kernel(LambRates r, const Grad* grad, const float* weight, float* mean, float* variance, \
                                    int64_t count) {                                                                  \
    return moments_loop(r, grad, weight, mean, variance, count);                                                      \
  }
KERNEL(float)
KERNEL(bfloat16)
#undef KERNEL

VECTORIZED void weights_kernel(LambRates r, float lr, float* weight, const float* mean, const float* variance,
                               int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) weight[i] = weight[i] - lr * direction_of(r, mean[i], variance[i], weight[i]);
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
      : lower(static_cast<float>(attributes.number("lower_bound", -1))),
        upper(static_cast<float>(attributes.number("upper_bound", -1))) {}
  float lower, upper;
};

float trusted_rate(float lr, const Squares& squares, const Bounds& bounds) {
  float weight = static_cast<float>(std::sqrt(squares.weight));
  const float direction = static_cast<float>(std::sqrt(squares.direction));
  if (bounds.lower >= 0) weight = std::max(weight, bounds.lower);
  if (bounds.upper >= 0) weight = std::min(weight, bounds.upper);
  return weight == 0 || direction == 0 ? lr : lr * weight / direction;
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  update_shapes<2>(attributes, inputs, outputs);
  lamb_rates(attributes, inputs.size() / 4);
  Bounds{attributes};
}

void update(const Attributes& attributes, const Tensors& inputs, const Tensors&) {
  const Weights<2> weights(inputs);
  const std::vector<LambRates> rates = lamb_rates(attributes, weights.size());
  std::vector<Squares> parts(weights.ranges().size()), squares(weights.size());
  weights.for_each([&](const Range& range, int64_t i) {
    const auto run = [&](const auto* grad) {
      parts[i] = moments_kernel(rates[range.index], grad, weights.values(range), weights.state(range, 0),
                                weights.state(range, 1), range.size());
    };
    weights.with_grad(range, run);
  });
  for (size_t i = 0; i < parts.size(); ++i) {
    squares[weights.ranges()[i].index].weight += parts[i].weight;
    squares[weights.ranges()[i].index].direction += parts[i].direction;
  }
  const Bounds bounds(attributes);
  weights.for_each([&](const Range& range, int64_t) {
    const LambRates& r = rates[range.index];
    weights_kernel(r, trusted_rate(r.rates.lr, squares[range.index], bounds), weights.values(range),
                   weights.state(range, 0), weights.state(range, 1), range.size());
  });
}

}  // namespace

const Operator lamb = made_update<2>("_gluon_amp_lamb", update, shapes);

}  // namespace gluon_amp
