// What the core library holds.
#include "families.h"
#include "operator.h"

namespace gluon_amp {

const std::vector<const Operator*>& operators() {
  static const std::vector<const Operator*> all{
      &layer_norm,     &clip,       &scale_rows,   &dropout,       &gelu,           &prelu,       &softmax_op,
      &log_softmax_op, &sgd,        &sgd_momentum, &nag,           &adam,           &adamw,       &lamb,
      &attention,      &batch_dot,  &dense,        &rnn,           &batch_norm,     &convolution, &pooling,
      &resize,         &all_finite, &hard_swish,   &channel_means, &scale_channels, &box_nms,     &sum_op};
  return all;
}

}  // namespace gluon_amp
