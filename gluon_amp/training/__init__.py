"""Training: loss scalers on trainers, and their checkpoints.

``scaling``         init_trainer, scale_loss, unscale and their kin
``trainer_scaler``  the decision on a step: which scale its gradients carry, whether to skip it
``loss_scaler``     the update rule of the loss scale
``checkpoint``      state_dict, save_states and their counterparts
``estimator``       event handlers for gluon.contrib.estimator
"""
