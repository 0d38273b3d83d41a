# WorldMove with the system's UCX, for InfiniBand and RoCE: the wheels' UCX has no transports for either.
#
# In the build's folder: the packages of one UCX release from 1.19 to 1.21 for this Ubuntu and this CUDA, with its
# CUDA plug-ins (ucx-*.deb and ucx-cuda-*.deb of the release; Ubuntu 24.04's own libucx0 is too old).
#   docker build --tag worldmove:rdma --file deploy/rdma.Dockerfile FOLDER
# Run it with --device=/dev/infiniband --ulimit memlock=-1, and look at `worldmove doctor`.
ARG BASE=worldmove:latest
FROM ${BASE}
USER root
ENV DEBIAN_FRONTEND=noninteractive
COPY ucx-*.deb /tmp/ucx/
# The last line fails the build unless all four libraries are found by the names that UCXX's loader asks for: for each
# that is not, it would take the wheel's without a word.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ibverbs-providers libibverbs1 librdmacm1 /tmp/ucx/*.deb \
    && rm -rf /var/lib/apt/lists/* /tmp/ucx \
    && ldconfig \
    && python -c "import ctypes; [ctypes.CDLL(f'lib{name}.so') for name in ('ucs', 'ucs_signal', 'uct', 'ucp')]"
ENV RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true
USER 10001:10001
