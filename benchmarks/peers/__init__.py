"""What Shoal is measured against: PyTorch's own ways to train the same model, one documented file for each.

Every peer trains what the engine trains: the same arithmetic on the same samples from the same first weights, so that
after any number of steps both have the same loss, and `benchmarks.throughput` shows that they do.
"""
