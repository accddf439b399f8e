"""Lightning's Trainer and Fabric with the DeepSpeed strategies, on CPU ranks."""
