# The server on a CPU: docker run -p 8000:8000 -v /srv/models:/models timemix checkpoint=/models/MODEL
FROM python:3.13-slim
WORKDIR /timemix
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY rwkv rwkv
COPY configs configs
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
 && pip install --no-cache-dir -c constraints.txt ".[serve]"
RUN useradd --create-home --uid 1000 timemix
USER 1000
WORKDIR /home/timemix
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", \
  "import urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["timemix", "serve", "host=0.0.0.0"]
