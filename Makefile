test:
	python3 -m venv .venv
	.venv/bin/pip install -q "pydantic>=2.10,<3" "pyyaml>=6,<7" pytest pytest-timeout
	.venv/bin/python -m pytest tests
