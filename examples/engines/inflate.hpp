#pragma once
/// @file inflate.hpp
/// Makes a model larger and slower without changing what it computes.

#include <cstddef>
#include <filesystem>
#include <vector>

#include "engines/gguf.hpp"

namespace lookahead::engines {

/// Sizes of the larger model; 0 keeps the source's.
struct InflateOptions {
  int width = 0;   ///< the source's times a power of 4
  int blocks = 0;  ///< at least the source's
  int feed = 0;    ///< at least the source's; whole blocks of 32 where the weights are quantised
  unsigned seed = 1;
};

/// A Llama model that gives the logits of `source` to the last bit, at the cost of a larger model: real steps of a
/// small model's text. Returns the image of a file, with the weight types of the source.
///
/// What is added computes, but nothing comes of it: new columns meet zeros, and new rows that would write to the
/// residual stream are zero, as are the down-projections of a wider feed-forward and both output projections of new
/// blocks. All other new weights are random. With the width times 4^k, the mean square falls by 4^k: epsilon follows,
/// and the norm weights make up for it; both are powers of two and so exact.
///
/// Throws `InvalidArgument` for sizes that are smaller or that do not fit, `ModelFileError` where `source` is no
/// complete Llama model.
std::vector<std::byte> inflate(const GgufFile& source, const InflateOptions& options);

/// The same from file to file. Replaces `target`, but not `source`, whatever its path is: that throws
/// `InvalidArgument`. Throws `std::runtime_error` where `target` cannot be written, and removes what was written of it.
void inflate_file(const std::filesystem::path& source, const std::filesystem::path& target,
                  const InflateOptions& options);

}  // namespace lookahead::engines
