"""What all communication needs: devices, timeouts, stores, ranks of groups, counters, and the base class of codecs."""
