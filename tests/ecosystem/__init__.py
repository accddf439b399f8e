"""The libraries that people use deepspeed through, as they are installed."""
