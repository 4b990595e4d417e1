"""MoE layers as people write them in each framework, inside the training steps that they write around them."""
