// The operators of the core library.
#pragma once

#include "operator.h"

namespace gluon_amp {

extern const Operator layer_norm, dropout, gelu, prelu, softmax_op, log_softmax_op;
extern const Operator clip, hard_swish, channel_means, scale_channels, scale_rows, batch_norm, pooling, resize,
    all_finite, box_nms, sum_op;
extern const Operator sgd, sgd_momentum, nag, adam, adamw, lamb;
// These need oneDNN when they run.
extern const Operator attention, batch_dot, convolution, dense, rnn;

}  // namespace gluon_amp
