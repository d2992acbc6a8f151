#pragma once
/// @file thread_group.hpp
/// Groups of host threads: they run what a device block will run, and find what a serial group cannot: a missing sync.

#include <barrier>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "lookahead/group.hpp"

namespace threads {

/// What the threads of a group share. Threads either run freely between two syncs (then the thread sanitizer sees every
/// race), or one after another in an order that changes at every sync (then a missing sync gives wrong values even
/// without a sanitizer, because a reader runs before its writer).
class Crew {
 public:
  Crew(int size, bool in_turns, int skipped_sync)
      : size_(size), in_turns_(in_turns), skipped_(skipped_sync), barrier_(size) {}

  void begin(int rank) {
    if (in_turns_) wait_for_turn(rank);
  }

  void end() {
    if (in_turns_) pass_turn();
  }

  void sync(int rank, int& number) {
    if (number++ == skipped_) return;
    if (!in_turns_) return barrier_.arrive_and_wait();
    pass_turn();
    wait_for_turn(rank);
  }

  int total = 0;  ///< of exclusive_sum

  [[nodiscard]] int size() const { return size_; }

 private:
  // Rank r runs in round p as number (r + p) % size, in the opposite order in even rounds: the first is the highest
  // rank's.
  void wait_for_turn(int rank) {
    std::unique_lock lock(mutex_);
    const int round = round_of_[static_cast<std::size_t>(rank)]++;
    const int place = (rank + round) % size_;
    const int turn = round * size_ + (round % 2 == 1 ? place : size_ - 1 - place);
    changed_.wait(lock, [&] { return turn_ == turn; });
  }

  void pass_turn() {
    const std::lock_guard lock(mutex_);
    ++turn_;
    changed_.notify_all();
  }

  int size_;
  bool in_turns_;
  int skipped_;
  std::barrier<> barrier_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int turn_ = 0;
  std::vector<int> round_of_ = std::vector<int>(static_cast<std::size_t>(size_));
};

/// One thread's handle. Every thread is a tile of its own.
class Group {
 public:
  Group(Crew& crew, int rank, int& syncs) : crew_(crew), syncs_(syncs), rank_(rank) {}
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return crew_.size(); }
  void sync() const { crew_.sync(rank_, syncs_); }
  [[nodiscard]] lookahead::SerialTile tile() const { return {rank_, crew_.size()}; }

  [[nodiscard]] int exclusive_sum(int* a, int n) const {
    sync();
    if (rank_ == 0) crew_.total = lookahead::SerialGroup{}.exclusive_sum(a, n);
    sync();
    return crew_.total;
  }

  void sort(std::uint64_t* a, int n) const { lookahead::detail::sort_in_place(*this, a, n); }

 private:
  Crew& crew_;
  int& syncs_;
  int rank_;
};

static_assert(lookahead::Group<Group>);

/// Runs `f(group)` on `size` threads; returns how often they synced. The sync with number `skipped` (from 0) is left
/// out.
template <class F>
int run(int size, bool in_turns, F f, int skipped = -1) {
  Crew crew(size, in_turns, skipped);
  std::vector<int> syncs(static_cast<std::size_t>(size));
  std::vector<std::thread> crew_threads;
  for (int rank = 0; rank < size; ++rank)
    crew_threads.emplace_back([&, rank] {
      crew.begin(rank);
      f(Group(crew, rank, syncs[static_cast<std::size_t>(rank)]));
      crew.end();
    });
  for (std::thread& t : crew_threads) t.join();
  return syncs[0];
}

/// Who runs the phases of a step: `run(f)` calls f(group).
struct Serial {
  template <class F>
  void run(F f) const {
    f(lookahead::SerialGroup{});
  }
};

struct Threads {
  int size;
  bool in_turns;
  template <class F>
  void run(F f) const {
    threads::run(size, in_turns, f);
  }
};

}  // namespace threads
