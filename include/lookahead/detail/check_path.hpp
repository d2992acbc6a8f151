#pragma once
/// @file check_path.hpp
/// What an adapter checks before it commits.

#include <cstddef>
#include <cstdint>
#include <span>

#include "lookahead/errors.hpp"

namespace lookahead::detail {

/// Throws InvalidArgument unless `path` is a path of the tree with these parents that begins with its rows 0 to `root`.
/// No parents: there is no tree.
inline void check_path(std::span<const std::int32_t> path, std::span<const std::int32_t> parents, std::size_t root) {
  bool good = !parents.empty() && path.size() > root;
  for (std::size_t i = 0; good && i < path.size(); ++i)
    good = path[i] >= 0 && static_cast<std::size_t>(path[i]) < parents.size() &&
           parents[static_cast<std::size_t>(path[i])] == (i == 0 ? -1 : path[i - 1]);
  if (!good) throw InvalidArgument("what was to be committed is no path of the latest tree that begins with its root");
}

}  // namespace lookahead::detail
