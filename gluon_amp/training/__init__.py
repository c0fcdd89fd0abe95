"""Training: loss scalers on trainers, and what is saved of them.

``scaling``         init_trainer, scale_loss, unscale and their kin
``trainer_scaler``  what connects a trainer with its loss scalers
``loss_scaler``     the update rule of the loss scale
``checkpoint``      state_dict, save_states and their counterparts
``estimator``       event handlers for gluon.contrib.estimator
"""
