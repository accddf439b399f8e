"""What a run did: each rank writes where its steps' time went; ``ds_report_run`` makes one page of it."""
