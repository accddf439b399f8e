"""Reports where the time of a run went: each rank writes a file; ``ds_report_run`` makes a page of all files."""
