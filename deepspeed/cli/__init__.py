"""Command-line tools beside the launcher, one module each, named in ``[project.scripts]`` of pyproject.toml.

:mod:`.report` and :mod:`.facts` (``ds_report``), :mod:`.plan` (``ds_plan``), :mod:`.inspect_checkpoint`
(``ds_inspect``), :mod:`.io_speed` (``ds_io``), :mod:`.elastic` (``ds_elastic``), :mod:`.ssh` (``ds_ssh``);
:mod:`.later` stands in for commands to come. :mod:`.command` is how all of them, and the launcher's, end.
"""
