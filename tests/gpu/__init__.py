"""What must hold on a real GPU. ``pytest -m gpu`` runs it there; without one each test runs on the simulated device."""
