#pragma once
/// @file pool_file.hpp
/// Pools in files: what a pool has learnt outlives the process.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "lookahead/estimates.hpp"
#include "lookahead/ngram_pool.hpp"

namespace lookahead {

/// What is wrong with a file of a pool.
enum class PoolFileFault : std::uint8_t {
  unwritable,  ///< it cannot be written
  unreadable,  ///< it cannot be read
  not_a_pool,  ///< it begins with something else
  byte_order,  ///< a machine of the other byte order wrote it
  version,     ///< another version of the format
  tokenizer,   ///< it belongs to another tokenizer
  size,        ///< a size that no pool has
  truncated,   ///< it ends too early
  trailing,    ///< it goes on behind its end
  checksum,    ///< its bytes are not those that were written
  clock        ///< its newest entry is older than the entries that it has forgotten
};

/// A pool could not be saved or loaded. The message names the file, the value, the limit and the remedy.
struct PoolFileError : std::runtime_error {
  PoolFileError(PoolFileFault what_is_wrong, const std::filesystem::path& path, const std::string& message)
      : std::runtime_error(path.string() + " " + message), fault(what_is_wrong) {}
  PoolFileFault fault;
};

namespace detail {

/// A hash of 64-bit words. One changed word always changes it.
class WordHash {
 public:
  void add(std::uint64_t word) {
    state_ = (state_ ^ word) * 0x9E3779B97F4A7C15U;
    state_ ^= state_ >> 32;
  }
  /// The last word is filled up with zeros.
  void add(const void* bytes, std::size_t size) {
    const auto* from = static_cast<const char*>(bytes);
    for (; size > 0; from += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      const std::size_t n = size < sizeof word ? size : sizeof word;
      std::memcpy(&word, from, n);
      add(word);
      size -= n;
    }
  }
  [[nodiscard]] std::uint64_t value() const { return detail::mixed(state_); }

 private:
  std::uint64_t state_ = 0x2545F4914F6CDD1DU;
};

/// How a file begins. `set_count` sets and the hash of everything before it follow.
struct PoolFileHeader {
  static constexpr std::array<char, 8> its_magic{'l', 'o', 'o', 'k', 'p', 'o', 'o', 'l'};
  static constexpr std::uint32_t its_byte_order = 0x01020304;
  /// Goes up with each change of the layout, of the hash of a context, of the lengths of contexts, or of the sources.
  static constexpr std::uint32_t its_version = 3;

  std::array<char, 8> magic = its_magic;
  std::uint32_t byte_order = its_byte_order, version = its_version;
  std::uint64_t tokenizer = 0;
  std::uint32_t set_slots = PoolSet::slots, set_count = 0;
  PoolClock clock{0, 0};

  [[nodiscard]] std::uint64_t file_size() const {
    return sizeof(PoolFileHeader) + std::uint64_t{set_count} * sizeof(PoolSet) + sizeof(std::uint64_t);
  }
};
static_assert(sizeof(PoolFileHeader) == 40 && sizeof(PoolSet) == 384);

/// Empties the slots that give nothing: forgotten ones, and what no pool would have written.
inline void clean(PoolSet& set, const PoolClock& clock, std::size_t vocabulary) {
  for (int i = 0; i < PoolSet::slots; ++i)
    if (set.stamp[i] <= clock.floor || set.stamp[i] > clock.now || set.token[i] >= vocabulary)
      set.key[i] = set.token[i] = set.stamp[i] = 0;
}

inline std::string hexadecimal(std::uint64_t x) {
  std::array<char, 24> text{};
  std::snprintf(text.data(), text.size(), "0x%016llx", static_cast<unsigned long long>(x));
  return text.data();
}

}  // namespace detail

/// A number that tells tokenizers apart: a hash of the byte strings of their tokens, in order. `pieces` is a range of
/// what becomes a std::string_view.
template <class Pieces>
[[nodiscard]] std::uint64_t tokenizer_fingerprint(const Pieces& pieces) {
  detail::WordHash hash;
  for (const auto& piece : pieces) {
    const std::string_view bytes = piece;
    hash.add(bytes.size());
    hash.add(bytes.data(), bytes.size());
  }
  return hash.value();
}

/// Saves an `NGramPool` or a `SharedNGramPool`, all namespaces of it: 384 bytes for each set of 32 slots. `tokenizer`
/// is a number that `load_pool` must be given again, `tokenizer_fingerprint` for example. The file appears under its
/// name when it is complete, in place of an older one; until then it lies beside it, as `path` and a suffix. A shared
/// pool may be in use: what is filed meanwhile may be left out.
///
/// The file tells what was said: treat it as the texts that the pool has seen. Forgotten entries are not in it.
/// Throws PoolFileError (unwritable); then an older file is as it was.
template <class Pool>
void save_pool(const Pool& pool, const std::filesystem::path& path, std::uint64_t tokenizer) {
  std::random_device random;
  std::filesystem::path temporary = path;
  temporary += "." + detail::hexadecimal(std::uint64_t{random()} << 32 | random()) + ".tmp";
  struct Remover {
    const std::filesystem::path& path;
    std::error_code ignored{};
    ~Remover() { std::filesystem::remove(path, ignored); }
  } remover{temporary};
  std::ofstream out(temporary, std::ios::binary);
  detail::WordHash hash;
  const auto write = [&](const auto& what) {
    out.write(reinterpret_cast<const char*>(&what), sizeof what);
    hash.add(&what, sizeof what);
  };
  detail::PoolFileHeader header;
  header.tokenizer = tokenizer;
  header.set_count = static_cast<std::uint32_t>(pool.slots() / PoolSet::slots);
  header.clock = pool.clock();
  write(header);
  for (std::uint32_t i = 0; i < header.set_count && out; ++i) {
    PoolSet set = pool.set(i);
    detail::clean(set, header.clock, std::size_t{1} << 32);
    write(set);
  }
  write(hash.value());
  out.close();
  std::error_code error;
  if (out) std::filesystem::rename(temporary, path, error);
  if (!out || error)
    throw PoolFileError(PoolFileFault::unwritable, path,
                        "cannot be written" + (error ? " (" + error.message() + ")" : std::string()) + ": it needs " +
                            std::to_string(header.file_size()) + " bytes in a folder that may be written to");
}

/// Loads what `save_pool` saved, as an `NGramPool` or a `SharedNGramPool`, whichever it was: namespace 0 of a shared
/// pool is a private pool's content. The pool has the saved one's size and behaves exactly like it. Entries with a
/// token that is not in [0, vocabulary) are left out, so that a file, whatever it holds, can cost rows but change no
/// text. Throws PoolFileError; a file is never believed to be larger than it is.
template <class Pool>
[[nodiscard]] Pool load_pool(const std::filesystem::path& path, std::uint64_t tokenizer, std::size_t vocabulary) {
  using Header = detail::PoolFileHeader;
  using Fault = PoolFileFault;
  const auto refuse_if = [&](bool wrong, Fault fault, const auto& message) {
    if (wrong) throw PoolFileError(fault, path, message());
  };
  std::error_code error;
  const std::uint64_t size = std::filesystem::file_size(path, error);
  std::ifstream in(path, std::ios::binary);
  refuse_if(error || !in, Fault::unreadable, [] { return "cannot be read; check the path"; });

  detail::WordHash hash;
  const auto read = [&](auto& what) {
    refuse_if(!in.read(reinterpret_cast<char*>(&what), sizeof what), Fault::unreadable,
              [] { return "cannot be read to its end; was it changed meanwhile?"; });
    const std::uint64_t before = hash.value();
    hash.add(&what, sizeof what);
    return before;
  };
  const auto truncated_to = [&](std::uint64_t needed) {
    return [&, needed] {
      return "has " + std::to_string(size) + " bytes and should have " + std::to_string(needed) +
             ": it is truncated, save it again";
    };
  };
  Header header;
  refuse_if(size < sizeof header, Fault::truncated, truncated_to(sizeof header));
  read(header);
  refuse_if(header.magic != Header::its_magic, Fault::not_a_pool,
            [] { return "does not begin with \"lookpool\": pass a file that save_pool wrote"; });
  refuse_if(header.byte_order != Header::its_byte_order, Fault::byte_order, [&] {
    return "has the byte order " + detail::hexadecimal(header.byte_order) + ", not " +
           detail::hexadecimal(Header::its_byte_order) + ": build the pool on a machine like this one";
  });
  refuse_if(header.version != Header::its_version, Fault::version, [&] {
    return "has version " + std::to_string(header.version) + " of the format, and version " +
           std::to_string(Header::its_version) + " can be read: build the pool again";
  });
  refuse_if(header.tokenizer != tokenizer, Fault::tokenizer, [&] {
    return "belongs to the tokenizer " + detail::hexadecimal(header.tokenizer) + ", not to " +
           detail::hexadecimal(tokenizer) + ": build a pool with this model's tokenizer";
  });
  constexpr std::size_t most = PoolMemory::max_slots / PoolSet::slots;
  refuse_if(header.set_slots != PoolSet::slots || header.set_count == 0 || header.set_count > most, Fault::size, [&] {
    return "has " + std::to_string(header.set_count) + " sets of " + std::to_string(header.set_slots) +
           " slots, and a pool has 1 to " + std::to_string(most) + " sets of " + std::to_string(PoolSet::slots) +
           ": it is damaged, save it again";
  });
  refuse_if(size < header.file_size(), Fault::truncated, truncated_to(header.file_size()));
  refuse_if(size > header.file_size(), Fault::trailing, [&] {
    return "has " + std::to_string(size) + " bytes and should have " + std::to_string(header.file_size()) +
           ": something was added, save it again";
  });

  PoolMemory memory{std::vector<PoolSet>(header.set_count), header.clock};
  for (PoolSet& set : memory.sets) {
    read(set);
    detail::clean(set, header.clock, vocabulary);
  }
  std::uint64_t written = 0;
  const std::uint64_t found = read(written);
  refuse_if(written != found, Fault::checksum, [&] {
    return "has the checksum " + detail::hexadecimal(found) + " instead of " + detail::hexadecimal(written) +
           ": it is damaged, save it again";
  });
  refuse_if(header.clock.floor > header.clock.now, Fault::clock, [&] {
    return "has the clock " + std::to_string(header.clock.now) + ", below its floor of " +
           std::to_string(header.clock.floor) + ": it is damaged, save it again";
  });
  return Pool(std::move(memory));
}

}  // namespace lookahead
