# tag2box on a CPU. Build: docker build -t tag2box .   Run: docker run --rm -v "$PWD:/data" tag2box demo --small --out demo
FROM python:3.11-slim-bookworm

ENV PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 TAG2BOX_HOME=/data/.tag2box

# The versions and hashes that the tests run with. The build of torch without CUDA is not on PyPI: pass
# --build-arg TORCH_INDEX=ADDRESS with the address of PyTorch's index of CPU builds; without it, CUDA comes along.
ARG TORCH_INDEX=
WORKDIR /src
COPY requirements.lock requirements-cpu.lock requirements-torch.lock ./
RUN if [ -n "$TORCH_INDEX" ]; then \
        pip install --require-hashes --only-binary :all: --no-deps --index-url "$TORCH_INDEX" -r requirements-cpu.lock; \
    else \
        pip install --require-hashes --only-binary :all: --no-deps -r requirements-torch.lock; \
    fi \
    && pip install --require-hashes --only-binary :all: -r requirements.lock

COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY src ./src
RUN pip install --no-deps --no-build-isolation . && rm -rf /src

RUN useradd --create-home user && mkdir /data && chown user /data
USER user
WORKDIR /data
ENTRYPOINT ["tag2box"]
CMD ["--help"]
