"""Command-line tools beside the launcher, one module each, named in ``[project.scripts]`` of pyproject.toml.

:mod:`.report` (``ds_report``), :mod:`.plan`, :mod:`.predict` and :mod:`.measure` (``ds_plan``),
:mod:`.inspect_checkpoint` (``ds_inspect``), :mod:`.report_run` (``ds_report_run``), :mod:`.trace` (``ds_trace``),
:mod:`.io_speed` (``ds_io``), :mod:`.nvme_tune` (``ds_nvme_tune``), :mod:`.bench` (``ds_bench``), :mod:`.elastic`
(``ds_elastic``), :mod:`.ssh` (``ds_ssh``). :mod:`.command` handles errors and exit codes of all of them, and of the
launcher's commands.
"""
