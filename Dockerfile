# The node, the worker SDK and the demo. As it is: for GPUs (CUDA 13), which also runs without any.
#   docker build --tag worldmove .
# Without CUDA, for host memory alone (a third of the size):
#   docker build --tag worldmove:host --build-arg BASE=ubuntu:24.04 --build-arg EXTRAS=host .
# CUDA 12 (constraints.txt pins CUDA 13's packages):
#   docker build --tag worldmove:cu12 --build-arg BASE=nvidia/cuda:12.9.1-runtime-ubuntu24.04 \
#     --build-arg EXTRAS=cu12 --build-arg PINS=/dev/null .
# docs/containers.md says how to run it, and deploy/rdma.Dockerfile adds InfiniBand.
ARG BASE=nvidia/cuda:13.0.2-runtime-ubuntu24.04

FROM ${BASE} AS build
ENV DEBIAN_FRONTEND=noninteractive
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY worldmove worldmove
COPY api api
ARG EXTRAS=cu13
ARG PINS=constraints.txt
# The build backend is installed first and pinned like the rest: no isolated build fetches another one.
RUN python3 -m venv /opt/worldmove \
    && /opt/worldmove/bin/pip install --no-cache-dir -c "${PINS}" setuptools \
    && /opt/worldmove/bin/pip install --no-cache-dir -c "${PINS}" --no-build-isolation ".[${EXTRAS}]" \
    && /opt/worldmove/bin/pip uninstall --yes setuptools

FROM ${BASE}
ENV DEBIAN_FRONTEND=noninteractive
# The keeper outlives its node and is then a child of process 1, which has to reap it: hence tini.
# Both folders belong to the user, so that a new volume mounted there does, too.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 worldmove \
    && useradd --create-home --uid 10001 --gid 10001 worldmove \
    && install --directory --owner 10001 --group 10001 --mode 0700 /run/worldmove /var/lib/worldmove
COPY --from=build /opt/worldmove /opt/worldmove
# Compiled kernels are kept beside the ledger: a GPU's first start compiles them. The driver's libraries come
# from the host (NVIDIA Container Toolkit); CUDA alone is asked for, no graphics.
ENV PATH=/opt/worldmove/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    CUPY_CACHE_DIR=/var/lib/worldmove/cupy \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /home/worldmove
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "worldmove"]
CMD ["demo"]
# Asks the node at WORLDMOVE_URL; a container that runs something else switches it off (--no-healthcheck).
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 CMD ["python", "-c", "import os, ssl, urllib.request as r; r.urlopen(os.environ.get('WORLDMOVE_URL', 'http://127.0.0.1:8001') + '/v1/healthz', timeout=4, context=ssl.create_default_context(cafile=os.environ.get('WORLDMOVE_TLS_CA')))"]
