"""A Prometheus exporter that places llama.cpp decode under the machine's memory-bandwidth roofline."""
