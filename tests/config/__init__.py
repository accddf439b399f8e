"""Tests of deepspeed.config. All of them are pure."""
