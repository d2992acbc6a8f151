#include <lookahead/adapters/llama_cpp.hpp>
#include <lookahead/errors.hpp>

/// Links llama.cpp through the installed component; returns 0 if its adapter refuses a model that was not loaded.
int main() {
  try {
    const lookahead::LlamaCpp engine(nullptr);
    return 1;
  } catch (const lookahead::InvalidArgument&) {
    return 0;
  }
}
