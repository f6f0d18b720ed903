"""Keep RL rollout clusters bit-identical to their trainer by shipping only the weights that changed."""
