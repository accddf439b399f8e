"""Command-line tools beside the launcher: ``ds_report``, and the names of those that come later."""
