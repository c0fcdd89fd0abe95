// Updates of each value by itself. Operations and their order are those of MXNet's sgd_update, sgd_mom_update,
// nag_mom_update, adam_update and adamw_update, so that results have the same bits.
#include "updates.h"

#include "families.h"

namespace gluon_amp {

namespace {

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

#define KERNELS_OF(Rule, Grad)                                                                                   \
  VECTORIZED void update_kernel(Rule, Rates rates, const Grad* grad, float* weight, float* first, float* second, \
                                int64_t count) {                                                                 \
    update_loop<Rule>(rates, grad, weight, first, second, count);                                                \
  }
#define KERNELS(Rule)     \
  KERNELS_OF(Rule, float) \
  KERNELS_OF(Rule, bfloat16)
KERNELS(Sgd)
KERNELS(SgdMomentum)
KERNELS(Nag)
KERNELS(Adam)
KERNELS(AdamW)
#undef KERNELS
#undef KERNELS_OF

template <class Rule>
void update(const Attributes& attributes, const Tensors& inputs, const Tensors&) {
  const Weights<Rule::kStates> weights(inputs);
  const std::vector<Rates> rates = rates_of_weights(attributes, weights.size());
  weights.for_each([&](const Range& range, int64_t) {
    const auto run = [&](const auto* grad) {
      update_kernel(Rule(), rates[range.index], grad, weights.values(range), weights.state(range, 0),
                    weights.state(range, 1), range.size());
    };
    weights.with_grad(range, run);
  });
}

}  // namespace

const Operator sgd = made_update<0>("_gluon_amp_sgd", update<Sgd>);
const Operator sgd_momentum = made_update<1>("_gluon_amp_sgd_momentum", update<SgdMomentum>);
const Operator nag = made_update<1>("_gluon_amp_nag", update<Nag>);
const Operator adam = made_update<2>("_gluon_amp_adam", update<Adam>);
const Operator adamw = made_update<2>("_gluon_amp_adamw", update<AdamW>);

}  // namespace gluon_amp
