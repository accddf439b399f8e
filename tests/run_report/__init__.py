"""Tests of run reports."""
