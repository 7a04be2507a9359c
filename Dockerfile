# The image of roofline-exporter:
#
#     docker build -t roofline-exporter .
#     docker run --rm --network container:llama --read-only --cap-drop ALL --security-opt no-new-privileges \
#         -v "$PWD/config.yaml:/etc/roofline-exporter/config.yaml:ro" roofline-exporter
#
# BASE is any Debian or Ubuntu image whose `python3` is 3.11 or newer and can make virtual environments (Debian:
# python3-venv). Both stages start from it, so that the virtual environment finds the interpreter it was made with.
# Mirrors, proxies and certificates belong into BASE or into the builder's configuration: this file sets none.
ARG BASE=python:3.12-slim-bookworm

# --- build: a compiler and pip; nothing of it is shipped but /out ---
FROM ${BASE} AS build
# A python3 that is Debian's keeps its headers in a package of its own.
RUN apt-get update \
    && headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
    && if test -e "$headers"; then dev=; else dev=python3-dev; fi \
    && apt-get install -y --no-install-recommends gcc libc6-dev $dev \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /pip
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY . /source
WORKDIR /source
# Left out, a half of it all: the libraries' debug symbols, and what the packages name but the exporter never imports
# (highlighting, Markdown, a C parser). Bytecode is checked against nothing at run time: the files never change, and a copy
# may change their times.
RUN umask 022 \
    && /pip/bin/pip wheel --no-deps --wheel-dir /wheel . \
    && python3 -m venv --without-pip /opt/roofline-exporter \
    && pip="/pip/bin/pip --python /opt/roofline-exporter/bin/python" \
    && $pip install --no-compile -c constraints.txt /wheel/*.whl \
    && $pip uninstall -y pygments markdown-it-py mdurl pycparser \
    && find /opt/roofline-exporter -name '*.so' -exec strip --strip-unneeded {} + \
    && python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/roofline-exporter/lib \
    && install -D -m 644 config.yaml /out/etc/roofline-exporter/config.yaml \
    && mkdir -p /out/opt && mv /opt/roofline-exporter /out/opt/

# --- run: BASE and the virtual environment ---
FROM ${BASE}
COPY --from=build /out/ /
# Some bases ship the standard library without bytecode: what the exporter imports is compiled here once, not at every
# start. It also proves that the extension loads without the compiler's packages.
RUN /opt/roofline-exporter/bin/python -c 'import exporter.service.daemon, exporter.service.once, exporter.measure._membench'
# glibc would come to keep freed blocks of some MiB; a threshold that is set does not move.
ENV PATH=/opt/roofline-exporter/bin:$PATH PYTHONDONTWRITEBYTECODE=1 MALLOC_TRIM_THRESHOLD_=131072
# config.yaml is found here by every command, whatever flags are given.
WORKDIR /etc/roofline-exporter
# Numeric, so that Kubernetes can verify runAsNonRoot. There is no such account, and none is needed.
USER 65532:65532
EXPOSE 10470
ENTRYPOINT ["roofline-exporter"]
CMD ["--web.listen-address=0.0.0.0:10470"]
# Asks port 10470 on the loopback; with another --web.listen-address, give --health-cmd the same one.
HEALTHCHECK --interval=30s --timeout=10s --start-period=15s --retries=3 CMD ["roofline-exporter", "healthcheck"]

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="roofline-exporter" \
      org.opencontainers.image.description="Prometheus exporter that places a llama.cpp server's decode under this machine's memory-bandwidth roofline, continuously" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.authors="The roofline-exporter authors" \
      org.opencontainers.image.vendor="The roofline-exporter authors" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
