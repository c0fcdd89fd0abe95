// The operators of the core library.
#pragma once

#include "operator.h"

namespace gluon_amp {

extern const Operator layer_norm;
extern const Operator clip;
extern const Operator sgd, sgd_momentum, nag, adam, adamw, lamb;
// These need oneDNN when they run.
extern const Operator batch_dot, rnn;

}  // namespace gluon_amp
